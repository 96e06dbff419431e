"""FileComponent: a model in a file, in the place of a component folder. Checkpoint and LOAD_MODEL make it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kdit.errors import CheckpointError
from kdit.models.single_file.recognise import FilePart, open_parts
from kdit.models.single_file.text_encoders import fit_class
from kdit.models.weights.component_folder import ComponentFolder, ComponentScan, config_class
from kdit.models.weights.weight_files import WeightFiles


@dataclass(frozen=True)
class FileComponent(ComponentFolder):
    """``path`` is the file; the config was worked out from the tensors' shapes or, of a scheduler, is the published
    one.
    """

    component: str = ""
    part: str = ""
    stated: Mapping[str, object] = field(default_factory=dict)
    tensors: WeightFiles | None = None  # None: a scheduler
    fault: CheckpointError | None = None  # why it cannot be loaded

    @property
    def name(self) -> str:
        """Name of the component."""
        return self.component

    @property
    def config_path(self) -> Path:
        """The file: there is no config beside it."""
        return self.path

    @property
    def config(self) -> dict[str, object]:
        """The config."""
        return dict(self.stated)

    def scan(self) -> ComponentScan:
        """The file was checked when it was opened."""
        return ComponentScan(self.tensors, () if self.fault is None else (self.fault,))


def component_of(part: FilePart, name: str, class_name: str, config: Mapping[str, object]) -> FileComponent:
    """The component ``name`` from a part of a file; ``config`` without its class. A network whose config leaves
    something open cannot be loaded.
    """
    stated = {"_class_name": class_name} if part.library == "diffusers" else {"architectures": [class_name]}
    unknown = () if part.family is None else part.family.unknown(config)
    return FileComponent(
        part.path,
        class_name,
        part.library,
        component=name,
        part=part.part,
        stated={**config, **stated},
        tensors=WeightFiles(part.path, (part.path,), fit_class(class_name, part.tensors)),
        fault=_untold(part, ", ".join(unknown)) if unknown else None,
    )


def _untold(part: FilePart, names: str) -> CheckpointError:
    assert part.family is not None
    return CheckpointError(
        f"{part.path}: {names} is unknown; a {part.class_name} of this size was never published, and no shape shows"
        f" it; give a folder of a {part.family.title} pipeline whose transformer/config.json states it,"
        " components=FOLDER (--components FOLDER)"
    )


def locator(component: ComponentFolder) -> dict[str, object]:
    """What ``open_component`` needs to find the component again, as plain data."""
    if not isinstance(component, FileComponent):
        return {"path": str(component.path), "variant": component.variant}
    return {
        "path": str(component.path),
        "part": component.part,
        "component": component.name,
        "config": component.config,
    }


def open_component(
    path: str | Path,
    *,
    variant: str | None = None,
    part: str | None = None,
    component: str | None = None,
    config: Mapping[str, object] | None = None,
) -> ComponentFolder:
    """The model in a component folder or, with the rest of its locator, in a file. Raises CheckpointError."""
    if part is None or component is None or config is None:
        return ComponentFolder.at(path, variant=variant)
    found = next((held for held in open_parts(Path(path)).parts if held.part == part), None)
    if found is None:
        raise CheckpointError(f"{path} holds no part {part!r} any more")
    return component_of(found, component, config_class(dict(config), Path(path)), config)
