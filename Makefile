# make demo    a picture from a prompt: makes .venv, installs, writes out/demo.png
# make test    every test, and the parity run against diffusers
# make check   what CI runs: style, types, layers, tests
#
# PYTHON=python3.12 chooses another interpreter, PYTEST_ARGS="-k pins" some of the tests.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# First and by itself: asked for by another package's requirement, pip may fetch a CUDA build of several GB.
TORCH := torch==2.13.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
OFFLINE := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
PARITY_FAMILIES := flux_dev flux_schnell flux_fill flux_control flux_kontext sd3_medium sd35_medium \
    wan21_t2v wan21_t2v_euler wan21_i2v wan21_flf2v wan22_t2v_a14b wan22_i2v_a14b wan22_ti2v_5b wan22_ti2v_5b_i2v
REFERENCE := build/reference
REFERENCE_SOURCES := $(wildcard tests/reference/*.py tests/reference/families/*.py)

.NOTPARALLEL:
.PHONY: demo install test pytest parity check lint format types layers docs lock clean distclean

demo: $(VENV)/.kdit-installed
	mkdir -p out
	$(OFFLINE) $(BIN)/kdit generate "a red heart" -o out/demo.png

install: $(VENV)/.test-installed

test: pytest parity

pytest: $(VENV)/.test-installed
	$(OFFLINE) $(BIN)/python -m pytest $(PYTEST_ARGS)

parity: $(REFERENCE).made
	$(OFFLINE) $(BIN)/kdit verify $(REFERENCE)
	$(OFFLINE) $(BIN)/kdit verify $(REFERENCE) --mode batch

check: lint types layers test

lint: $(VENV)/.test-installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(VENV)/.test-installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(VENV)/.test-installed
	$(BIN)/mypy

layers: $(VENV)/.test-installed
	$(BIN)/lint-imports

# The documents that are made from the code.
docs: $(VENV)/.test-installed
	$(BIN)/python -m kdit.cli.models > docs/capabilities.md

# The references of the parity run: diffusers' own results on tiny checkpoints.
$(REFERENCE).made: $(REFERENCE_SOURCES) $(VENV)/.test-installed
	$(OFFLINE) $(BIN)/python -W ignore -m tests.reference --out $(REFERENCE) --family $(PARITY_FAMILIES)
	touch $@

$(VENV)/.torch-installed:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kdit needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	touch $@

$(VENV)/.kdit-installed: $(VENV)/.torch-installed pyproject.toml requirements-test.txt
	$(PIP) install --constraint requirements-test.txt --editable .
	touch $@

$(VENV)/.test-installed: $(VENV)/.kdit-installed
	$(PIP) install --constraint requirements-test.txt --editable '.[test]'
	touch $@

# Resolve the test dependencies anew and write down what came out, without torch and without this package.
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip --disable-pip-version-check --quiet install $(TORCH)
	build/lock/bin/python -m pip --disable-pip-version-check --quiet install --editable '.[test]'
	( echo "# The exact versions that the tests run with. Written by: make lock"; \
	  build/lock/bin/python -m pip --disable-pip-version-check freeze --exclude-editable --exclude torch --exclude setuptools \
	) > requirements-test.txt
	rm -rf build/lock

clean:
	rm -rf build dist out .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
