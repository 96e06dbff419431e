"""Case: one recorded call of the reference library, read from its folder. Used by verify/run.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from kdit.errors import CheckpointError, CheckpointMissingError, InputError
from kdit.models.weights.json_file import read_json

CASE_FILE, TENSOR_FILE = "case.json", "reference.safetensors"


class Seed(NamedTuple):
    """A call argument that was a random generator with this seed."""

    value: int


class ImageFile(NamedTuple):
    """A call argument that was an image, stored beside case.json."""

    path: Path


class FamilyFolder(NamedTuple):
    """A checkpoint and the cases recorded from it."""

    name: str
    model: Path
    cases: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What was called and every tensor that was recorded."""

    family: str
    name: str
    pipeline: str  # class of the reference library that was called
    call: Mapping[str, object]  # tensors, seeds and images already resolved
    draws: tuple[Mapping[str, object], ...]  # random draws in order: key, shape, by
    calls: Mapping[str, int]  # how often each component ran
    output_stride: int
    tensors: Mapping[str, Tensor]

    @property
    def where(self) -> str:
        """``family/case`` for messages."""
        return f"{self.family}/{self.name}"

    def tensor(self, key: str) -> Tensor:
        """A recorded tensor. Raises CheckpointError if the case lacks it."""
        if key not in self.tensors:
            raise CheckpointError(f"{self.where}: {TENSOR_FILE} has no tensor {key!r}")
        return self.tensors[key]


def find_families(root: Path, families: Sequence[str] = (), cases: Sequence[str] = ()) -> list[FamilyFolder]:
    """The families in ``root`` (or ``root`` itself, if it is one) that have a case left after the filters."""
    if not root.is_dir():
        raise CheckpointMissingError(f"no folder {root}; expected a folder of reference families, or one family")
    folders = [root] if _is_family(root) else [folder for folder in sorted(root.iterdir()) if _is_family(folder)]
    found = []
    for folder in folders:
        name = folder.resolve().name
        paths = tuple(
            path
            for path in sorted((folder / "cases").iterdir())
            if (path / CASE_FILE).is_file() and (not cases or path.name in cases)
        )
        if paths and (not families or name in families):
            found.append(FamilyFolder(name, folder / "model", paths))
    return found


def _is_family(folder: Path) -> bool:
    return (folder / "model").is_dir() and (folder / "cases").is_dir()


def read_case(folder: Path) -> Case:
    """Read case.json and reference.safetensors. Raises CheckpointError on damaged files."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    case_file, tensor_file = folder / CASE_FILE, folder / TENSOR_FILE
    if not tensor_file.is_file():
        raise CheckpointMissingError(f"no file {tensor_file} beside {CASE_FILE}")
    try:
        info: dict[str, Any] = read_json(case_file)
        tensors = load_file(tensor_file)
        return Case(
            family=info["family"],
            name=info["case"],
            pipeline=info["pipeline"],
            call={key: _resolve(value, folder, tensors) for key, value in info["call"].items()},
            draws=tuple(info["draws"]),
            calls=info["calls"],
            output_stride=info["output_stride"],
            tensors=tensors,
        )
    except KeyError as error:
        raise CheckpointError(f"{case_file}: {error} is missing") from error
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{case_file} is not a reference case: {error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{tensor_file} cannot be read: {error}") from error


def _resolve(value: object, folder: Path, tensors: Mapping[str, Tensor]) -> object:
    if isinstance(value, list):
        return [_resolve(item, folder, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$generator" in value:
        return Seed(value["$generator"])
    if "$image" in value:
        return ImageFile(folder / value["$image"])
    return value  # an object that only a family's mapping may know


class CallReader:
    """Hands out the arguments of a recorded call and remembers which, so that none is ignored."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._unread = set(case.call)

    def take(self, key: str) -> object:
        """The argument, or None if the call lacks it."""
        self._unread.discard(key)
        return self.case.call.get(key)

    def texts(self, key: str) -> str | list[str] | None:
        """A string or a list of strings."""
        value = self.take(key)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return [str(item) for item in value]
        raise self._unexpected(key, "a string or a list of strings")

    def whole(self, key: str, default: int) -> int:
        """A whole number."""
        value = self.take(key)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self._unexpected(key, "a whole number")

    def number(self, key: str, default: float) -> float:
        """A number."""
        value = self.take(key)
        if value is None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise self._unexpected(key, "a number")

    def tensor(self, key: str) -> Tensor | None:
        """A recorded tensor."""
        value = self.take(key)
        if value is None or isinstance(value, Tensor):
            return value
        raise self._unexpected(key, "a recorded tensor")

    def flag(self, key: str, default: bool) -> bool:
        """True or False."""
        value = self.take(key)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self._unexpected(key, "true or false")

    def images(self, key: str) -> str | list[str] | None:
        """The path of an image, or of each of a list."""
        value = self.take(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        paths = [str(item.path) for item in items if isinstance(item, ImageFile)]
        if len(paths) != len(items):
            raise self._unexpected(key, "an image or a list of images")
        return paths if isinstance(value, list) else paths[0] if paths else None

    def seeds(self, key: str) -> tuple[int, ...]:
        """Seeds of one generator, or of a list of generators; empty if there is none."""
        value = self.take(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        seeds = tuple(item.value for item in items if isinstance(item, Seed))
        if len(seeds) == len(items):
            return seeds
        raise self._unexpected(key, "a generator or a list of generators")

    def finish(self) -> None:
        """Raises InputError if an argument was never asked for."""
        if self._unread:
            names = ", ".join(sorted(self._unread))
            raise InputError(f"{self.case.where}: kdit cannot express these arguments of {self.case.pipeline}: {names}")

    def _unexpected(self, key: str, expected: str) -> InputError:
        got = type(self.case.call[key]).__name__
        return InputError(f"{self.case.where}: argument {key} must be {expected}, got {got}")
