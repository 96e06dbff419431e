"""The package as a whole: what importing it costs, what it exports, what it ships."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest

import kdit

HEAVY = {"torch", "diffusers", "transformers", "numpy", "PIL", "safetensors", "typer", "rich"}


def modules_after(code: str) -> set[str]:
    """The top-level names of all modules that a fresh interpreter holds after running ``code``."""
    script = code + "\nimport json, sys; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_kdit_imports_no_heavy_library() -> None:
    assert not HEAVY & modules_after("import kdit")


def test_settings_keys_and_errors_need_no_heavy_library() -> None:
    assert not HEAVY & modules_after("from kdit import SampleConfig, RuntimeConfig, TensorKey, KditError")


def test_help_imports_no_tensor_library() -> None:
    code = "import contextlib\nfrom kdit.cli.main import app\nwith contextlib.suppress(SystemExit): app(['--help'])"
    assert not (HEAVY - {"typer", "rich"}) & modules_after(code)


def test_help_takes_less_than_half_a_second() -> None:
    command = [sys.executable, "-c", "from kdit.cli.main import app; app()", "--help"]
    fastest = float("inf")
    for _ in range(5):  # processor time, and the best of some: other programs may be busy
        before = os.times()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = os.times()
        seconds = after.children_user + after.children_system - before.children_user - before.children_system
        assert seconds > 0
        fastest = min(fastest, seconds)
    assert "generate" in done.stdout
    assert fastest < 0.5


@pytest.mark.parametrize("name", kdit.__all__)
def test_every_exported_name_resolves(name: str) -> None:
    assert getattr(kdit, name) is not None
    assert name in dir(kdit)


def test_the_two_tables_of_exports_agree() -> None:
    listed = [name for names in kdit._HOMES.values() for name in names]
    assert len(listed) == len(set(listed))
    assert sorted([*listed, "__version__"]) == sorted(kdit.__all__)


def test_an_export_is_the_object_of_its_home_module() -> None:
    for module, names in kdit._HOMES.items():
        for name in names:
            assert getattr(kdit, name) is getattr(import_module(module), name)


def test_every_error_is_exported() -> None:
    errors = import_module("kdit.errors")
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert raised <= set(kdit.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Pipelin'"):
        getattr(kdit, "Pipelin")  # noqa: B009


def test_the_installed_package_has_this_version_and_a_command() -> None:
    assert metadata.version("kdit") == kdit.__version__
    (command,) = metadata.entry_points(group="console_scripts", name="kdit")
    assert command.value == "kdit.cli.main:app"


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(kdit.__file__).parent / "py.typed").is_file()
