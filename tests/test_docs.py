"""Documents and recipes name only files, make targets and layers that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("training/*.md"), *ROOT.glob("tests/reference/*.md")]
)
MADE_LATER = {"training/data", "training/checkpoints"}  # by the recipe, and not part of the repository

document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@document
def test_links_lead_to_files(path: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", path.read_text())
    local = [target.split("#")[0] for target in targets if "://" not in target and not target.startswith("#")]
    assert [target for target in local if not (path.parent / target).exists()] == []


@document
def test_paths_in_the_text_exist(path: Path) -> None:
    named = re.findall(r"`((?:kdit|tests|docs|training|benchmarks)/[\w./-]+)`", path.read_text())
    assert [name for name in named if name.rstrip("/") not in MADE_LATER and not (ROOT / name).exists()] == []


@document
def test_make_targets_in_the_text_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z]+)`", path.read_text())) | set(
        re.findall(r"^    make ([a-z]+)", path.read_text(), re.MULTILINE)
    )
    assert named <= targets


def test_every_package_has_a_layer() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    names = {re.sub(r"[()\s]", "", name).split(".")[0] for layer in layers for name in layer.split("|")}
    packages = {folder.parent.name for folder in (ROOT / "kdit").glob("*/__init__.py")}
    assert packages <= names
