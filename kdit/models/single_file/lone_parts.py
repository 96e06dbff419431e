"""lone_parts: where the models of a file without a network belong. Opening such a file and ``kdit inspect`` tell it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kdit.models.single_file.component_table import FOUND, MISSING, ComponentRow
from kdit.models.single_file.family import Config, SingleFileFamily, families
from kdit.models.single_file.file_component import FileComponent, component_of
from kdit.models.single_file.parts import NETWORK, VAE
from kdit.models.single_file.recognise import FilePart, open_parts
from kdit.models.single_file.text_encoders import can_be, config_from_shapes


class Place(NamedTuple):
    """A component of a family's pipelines that a part can be."""

    family: SingleFileFamily
    component: str


class LoneParts(NamedTuple):
    """A file that makes no pipeline, mostly for want of a network."""

    components: tuple[FileComponent, ...]  # named by their classes
    rows: tuple[ComponentRow, ...]  # the network that is missing, and what each part could supply
    families: tuple[str, ...]  # titles of those that it can supply something to


def lone_parts(path: Path) -> LoneParts:
    """What is known of the file. Raises CheckpointError, as ``open_parts``."""
    parts = open_parts(path).parts
    has_network = any(part.family is not None for part in parts)
    titles = (place.family.title for part in parts for place in places_of(part))
    components = tuple(component_of(part, part.class_name, part.class_name, _config(part)) for part in parts)
    return LoneParts(components, () if has_network else lone_rows(parts), tuple(dict.fromkeys(titles)))


def lone_rows(parts: Sequence[FilePart]) -> tuple[ComponentRow, ...]:
    """The table of a file with these parts."""
    found = [
        ComponentRow(place.component, FOUND, f"for {place.family.title}: --components {place.component}={part.path}")
        for part in parts
        for place in places_of(part)
    ]
    return (ComponentRow(NETWORK, MISSING, "give its file or its pipeline's folder as the model"), *found)


def places_of(part: FilePart) -> Iterator[Place]:
    """All places, in all families."""
    for family in families():
        if part.class_name == family.vae.class_name:
            yield Place(family, VAE)
        for name, component in family.text_parts.items():
            if part.part in (name, NETWORK) and can_be(family.components[component][1], part.class_name):
                yield Place(family, component)


def _config(part: FilePart) -> Config:
    if part.family is not None:
        return part.family.config(part.shapes, {})
    for family in families():
        if part.class_name == family.vae.class_name:
            return family.vae.config(part.shapes, {})
    return config_from_shapes(part.class_name, part.shapes, {})
