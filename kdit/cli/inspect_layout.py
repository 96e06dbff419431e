"""read_layout: as much of a checkpoint as can be read, whatever is wrong with it. ``kdit inspect`` calls it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kdit.errors import CheckpointError
from kdit.models.checkpoint import Checkpoint, read_components, read_index, resolve_model_path
from kdit.models.checkpoint_info import CheckpointInfo, read_info
from kdit.models.single_file.lone_parts import lone_parts
from kdit.models.single_file.sources import Components
from kdit.models.weights.component_folder import ComponentFolder


@dataclass(frozen=True)
class ModelLayout:
    """``checkpoint.index`` is empty where no pipeline is stated."""

    checkpoint: Checkpoint
    faults: tuple[str, ...] = ()  # those that belong to no component
    part_of: tuple[str, ...] = ()  # of a file without a network: families that it can supply something to


def read_layout(path: str | Path, components: Components | None) -> ModelLayout:
    """Raises CheckpointMissingError if there is nothing at all, and InputError for ``components`` of a wrong kind."""
    place, faults = resolve_model_path(path), dict[str, None]()
    attempts = [] if components is None else [components]
    for given in [*attempts, None] if place.is_file() else attempts:  # a file also without what does not fit it
        try:
            opened = Checkpoint.open(path, given)
        except CheckpointError as fault:
            faults[_message(fault)] = None
        else:
            return ModelLayout(opened, (*faults, *(() if opened.missing is None else (_message(opened.missing),))))
    return _parts(place, tuple(faults)) if place.is_file() else _folder(place, list(faults))


def _parts(path: Path, faults: tuple[str, ...]) -> ModelLayout:
    """Of a file that makes no pipeline; nothing of one that holds nothing known."""
    try:
        held = lone_parts(path)
    except CheckpointError:  # which is told already
        return ModelLayout(Checkpoint(path, {}, {}, CheckpointInfo()), faults)
    components: dict[str, ComponentFolder] = {component.name: component for component in held.components}
    return ModelLayout(Checkpoint(path, {}, components, CheckpointInfo(), held.rows), faults, part_of=held.families)


def _folder(folder: Path, faults: list[str]) -> ModelLayout:
    """Without a usable index, the sub-folders that have a model's config."""
    index: dict[str, object] = {}
    components: dict[str, ComponentFolder] = {}
    try:
        index = read_index(folder)
        components = read_components(folder, index)
    except CheckpointError as fault:
        faults.append(_message(fault))
        index = {}
        for config in sorted(folder.glob("*/config.json")):
            try:
                components[config.parent.name] = ComponentFolder.at(config.parent)
            except CheckpointError as other:
                faults.append(_message(other))
    info = CheckpointInfo()
    try:
        info = read_info(folder)
    except CheckpointError as fault:
        faults.append(_message(fault))
    return ModelLayout(Checkpoint(folder, index, components, info), tuple(faults))


def _message(fault: CheckpointError) -> str:
    """Without the table, which the report has as data."""
    return str(fault.args[0])
