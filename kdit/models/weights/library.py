"""Loads a class of transformers or diffusers from a folder: by name, locally, quietly, and only if all weights fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from torch import nn

from kdit.errors import CheckpointError
from kdit.models.weights.weight_files import samples

LoadedT = TypeVar("LoadedT")

# What the libraries raise for a folder they cannot use; a bare Exception from them stays a bug report.
_FOLDER_ERRORS: tuple[type[Exception], ...] = (
    OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError, ArithmeticError,
)  # fmt: skip


@contextmanager
def quiet(library: str) -> Iterator[None]:
    """Silence a library's warnings, log and progress bars; everything is as before afterwards.

    What matters of them comes as a CheckpointError.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log = import_module(f"{library}.utils.logging")
        verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
        log.set_verbosity(log.CRITICAL)
        log.disable_progress_bar()
        try:
            yield
        finally:
            log.set_verbosity(verbosity)
            if bars:
                log.enable_progress_bar()


def library_class(library: str, class_name: str, base: str, where: Path) -> type:
    """The class of that name in the installed library, if it is a subclass of the library's ``base``."""
    module = import_module(library)
    try:
        found = getattr(module, class_name, None)
    except ImportError as error:  # the class exists, but not what it needs
        raise CheckpointError(f"{where}: {library} cannot provide {class_name!r} here: {error}") from error
    if not isinstance(found, type) or not issubclass(found, getattr(module, base)):
        raise CheckpointError(
            f"{where} names the class {class_name!r}; {library} {module.__version__} has no such {base}"
        )
    return found


def from_folder(load: Callable[[], LoadedT], class_name: str, folder: Path) -> LoadedT:
    """Call a library's loader; its complaints about the folder become a CheckpointError."""
    # transformers checks configs with a class of huggingface_hub that is no builtin
    config_error: type[Exception] = getattr(import_module("huggingface_hub.errors"), "StrictDataclassError", ValueError)
    try:
        return load()
    except (*_FOLDER_ERRORS, config_error) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"component {folder.name}: {class_name} cannot load {folder}: {reason}") from error


def check_loading_info(info: dict[str, object], model: nn.Module, folder: Path) -> None:
    """Refuse a model that the folder filled only in part. ``info`` is the loader's ``output_loading_info``."""
    # Old checkpoints store buffers that the classes compute themselves now.
    own_buffers = {name for name, _ in model.named_buffers()}
    missing, mismatched = _names(info, "missing_keys"), info.get("mismatched_keys") or ()
    left_over = [name for name in _names(info, "unexpected_keys") if name not in own_buffers]
    parts = []
    if missing:
        parts.append(f"{len(missing)} tensors are missing: {samples(missing)}")
    if left_over:
        parts.append(f"{len(left_over)} tensors have no place in {type(model).__name__}: {samples(left_over)}")
    if mismatched:
        assert isinstance(mismatched, set | list | tuple)
        name, got, expected = sorted(mismatched)[0]
        parts.append(f"{len(mismatched)} tensors have another shape: {name} has {list(got)}, expected {list(expected)}")
    if parts:
        raise CheckpointError(f"component {folder.name}: {folder} does not fit its config.json: {'; '.join(parts)}")
    unfilled = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    assert not unfilled, f"{type(model).__name__} still has {unfilled} on the meta device"


def _names(info: dict[str, object], key: str) -> list[str]:
    names = info.get(key) or ()
    assert isinstance(names, set | list | tuple)
    return sorted(names)
