"""Checkpoint: a model folder in the diffusers layout, or a single file with what it lacks from elsewhere.

Pipeline and the command line open it; no model is built here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources import files as package_files
from pathlib import Path

from kdit.errors import CheckpointError, CheckpointMissingError
from kdit.keys import FAMILIES, PipelineKey
from kdit.models.checkpoint_info import CheckpointInfo, read_info
from kdit.models.single_file.assemble import Layout, assemble_file, assemble_folder
from kdit.models.single_file.component_table import ComponentRow
from kdit.models.single_file.sources import Components, read_sources
from kdit.models.weight_hash import weight_hash
from kdit.models.weights.component_folder import ComponentFolder, ComponentKind
from kdit.models.weights.json_file import read_json
from kdit.models.weights.weight_files import raise_first, samples

BUILT_IN = "mini"
INDEX_FILE, MODULAR_INDEX_FILE = "model_index.json", "modular_model_index.json"
_SINGLE_FILE_SUFFIXES = (".safetensors", ".gguf", ".sft", ".ckpt", ".pt", ".pth", ".bin")


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder or file: its index, its components, its own defaults."""

    path: Path
    index: dict[str, object]  # model_index.json; of a file, what it would say
    components: dict[str, ComponentFolder]  # those that are not null
    info: CheckpointInfo
    rows: tuple[ComponentRow, ...] = ()  # where components come from, if not all from one folder
    missing: CheckpointError | None = None  # what has to be supplied before a file can be used
    supplied: Mapping[str, str | None] = field(default_factory=dict)  # ``components`` as they were given

    @classmethod
    def open(cls, path: str | Path, components: Components | None = None) -> Checkpoint:
        """Open a folder, a single file (safetensors, GGUF), or the built-in model by its name.

        ``components``: a folder that supplies what a file lacks; or component -> its folder or file, which
        counts before the file's or folder's own; None leaves one out. Of folders, only the index and
        kdit.json are read, of files the headers; see ``check``.
        Raises CheckpointMissingError for what is not there, CheckpointError for what cannot be used.
        """
        place, sources = resolve_model_path(path), read_sources(components)
        if place.is_file():
            base = None if sources.base is None else _read_layout(resolve_model_path(sources.base))
            layout, info = assemble_file(place, base, sources), CheckpointInfo()
        else:
            if sources.base is not None:
                raise CheckpointError(
                    f"{place} is a folder of a whole pipeline: components={str(sources.base)!r} would supply nothing;"
                    " name the components to replace"
                )
            layout, info = assemble_folder(_read_layout(place), sources, place), read_info(place)
        return cls(place, layout.index, layout.components, info, layout.rows, layout.fault, sources.as_given())

    @property
    def pipeline_class(self) -> str:
        """The diffusers pipeline that the folder was saved from."""
        return str(self.index["_class_name"])

    def pipeline_keys(self) -> tuple[PipelineKey, ...]:
        """kdit's pipelines for this class of folder, in order of preference; raises CheckpointError listing the
        known classes.
        """
        known = _known_pipelines()
        if self.pipeline_class not in known:
            raise CheckpointError(
                f"{self.path / INDEX_FILE}: _class_name is {self.pipeline_class!r};"
                f" kdit has pipelines for {', '.join(known)}"
            )
        return known[self.pipeline_class]

    def component(self, name: str) -> ComponentFolder:
        """A component by its name in model_index.json."""
        if name not in self.components:
            held = ", ".join(self.components) or "none"
            raise CheckpointMissingError(f"{self.path / INDEX_FILE} has no component {name!r}; it lists {held}")
        return self.components[name]

    def scheduler_config(self) -> dict[str, object]:
        """The noise scheduler's settings, ``_class_name`` included."""
        return dict(self.component("scheduler").config)

    @cached_property
    def options(self) -> dict[str, bool | int | float | str]:
        """Scalar entries of model_index.json, such as boundary_ratio."""
        return {
            name: value
            for name, value in self.index.items()
            if not name.startswith("_") and isinstance(value, bool | int | float | str)
        }

    def faults(self) -> tuple[CheckpointError, ...]:
        """Everything that is wrong with any component, found without building one."""
        found = tuple(fault for folder in self.components.values() for fault in folder.scan().faults)
        return found if self.missing is None else (self.missing, *found)

    def with_variant(self, variant: str) -> Checkpoint:
        """The same with the weight files of ``variant`` in the components that have such.

        Raises CheckpointError if none has.
        """
        chosen = {name: replace(component, variant=variant) for name, component in self.components.items()}
        if not any(c.kind is ComponentKind.MODEL and _has(c, variant) for c in chosen.values()):
            raise CheckpointError(f"{self.path}: no component has weight files of the variant {variant!r}")
        return replace(self, components=chosen)

    def check(self) -> None:
        """Check every file of every component by its size and header; raises the first fault.

        To be called before the first model is built, so that nothing is built from a damaged folder.
        """
        raise_first(self.faults())

    def num_parameters(self) -> int:
        """Of all components together."""
        models = (folder for folder in self.components.values() if folder.kind is ComponentKind.MODEL)
        return sum(folder.open_weights().num_parameters for folder in models)

    def weight_hash(self) -> str:
        """Fingerprint of the weights of all components; see ``kdit.models.weight_hash``."""
        return weight_hash(
            (self._hash_name(name, path), path)
            for name, component in self.components.items()
            if component.kind is ComponentKind.MODEL
            for path in component.open_weights().files
        )

    def _hash_name(self, component: str, path: Path) -> str:
        """What a weight file counts as; a copy of a checkpoint in another place has the same hash."""
        if self.path.is_dir() and path.is_relative_to(self.path):
            return path.relative_to(self.path).as_posix()
        return f"{component}/{path.name}"


def _read_layout(folder: Path) -> Layout:
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file, expected a folder with {INDEX_FILE} that supplies components")
    index = read_index(folder)
    return Layout(index, read_components(folder, index))


def resolve_model_path(path: str | Path) -> Path:
    """The folder or file of a model: a path as it stands, or the package's data for the string "mini".

    A folder of that name is reached as "./mini". Raises CheckpointMissingError if there is nothing.
    """
    if not str(path).strip():
        raise CheckpointMissingError(f"the name of the model folder is empty: {str(path)!r}")
    if path == BUILT_IN:
        folder = Path(str(package_files("kdit"))) / "data" / BUILT_IN
    else:
        folder = Path(path).expanduser()
    if not folder.exists():
        hint = "; kdit reads local folders only, download the model first" if _looks_like_hub_id(str(path)) else ""
        raise CheckpointMissingError(f"there is no model folder {folder}{hint}")
    return folder


def read_index(folder: Path) -> dict[str, object]:
    """model_index.json of a folder; an error says what the folder holds instead."""
    path = folder / INDEX_FILE
    if not path.exists():
        raise CheckpointMissingError(f"{folder} has no {INDEX_FILE}: {_what_is_there(folder)}")
    index = read_json(path)
    if not isinstance(index.get("_class_name"), str):
        raise CheckpointError(f"{path} has no _class_name, expected the name of a pipeline")
    return index


def read_components(folder: Path, index: dict[str, object]) -> dict[str, ComponentFolder]:
    """The components that model_index.json lists, without the null ones; their folders need not exist."""
    found = {}
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list) or value == [None, None]:
            continue
        if len(value) != 2 or not all(isinstance(part, str) for part in value) or Path(name).name != name:
            raise CheckpointError(f"{folder / INDEX_FILE}: {name!r} is {value!r}, expected [library, class]")
        found[name] = ComponentFolder(folder / name, library=value[0], class_name=value[1])
    return found


def _has(component: ComponentFolder, variant: str) -> bool:
    weights = component.scan().weights
    return weights is not None and weights.variant == variant


def _known_pipelines() -> dict[str, tuple[PipelineKey, ...]]:
    return {name: keys for entry in FAMILIES.values() for name, keys in entry.pipelines.items()}


def _looks_like_hub_id(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~"))


def _what_is_there(folder: Path) -> str:
    present = sorted(path.name for path in folder.iterdir())
    if MODULAR_INDEX_FILE in present:
        return f"it is a modular pipeline ({MODULAR_INDEX_FILE}), which is not supported yet"
    if "config.json" in present:
        return "it looks like one component of a checkpoint; give the folder above it"
    if single := [name for name in present if name.endswith(_SINGLE_FILE_SUFFIXES)]:
        return f"it holds {samples(single)}; give the path of the file itself"
    return f"it holds {samples(present) or 'nothing'}; expected a folder that a diffusers pipeline was saved to"
