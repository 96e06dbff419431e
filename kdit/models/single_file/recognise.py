"""open_part: one model of a file, recognised by its tensors and with the names that its class gives them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kdit.errors import CheckpointError
from kdit.models.single_file.family import SingleFileFamily, families, recognise_network
from kdit.models.single_file.parts import Tensors, split_parts
from kdit.models.single_file.stored import read_stored
from kdit.models.single_file.text_encoders import recognise_text_encoder
from kdit.models.weights.weight_files import samples


@dataclass(frozen=True)
class FilePart:
    """A model in a file."""

    path: Path
    part: str  # its name among the parts of the file
    class_name: str
    tensors: Tensors  # by the names of the class
    library: str  # whose class it is, or would be: networks are kdit's own by the name of diffusers' class
    family: SingleFileFamily | None = None  # of a network

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        return {name: info.shape for name, info in self.tensors.items()}


@dataclass(frozen=True)
class FileParts:
    """All models of a file, and what belongs to none that kdit knows."""

    parts: tuple[FilePart, ...]
    unknown: tuple[str, ...]  # stored names


def open_parts(path: Path) -> FileParts:
    """Recognise all models of a file. Raises CheckpointError with sample names if there is none."""
    models, others = split_parts(read_stored(path))
    parts = []
    unknown = list(others)
    for name, tensors in models.items():
        if part := _recognise(path, name, tensors):
            parts.append(part)
        else:
            unknown += [f"{name}: {key}" for key in tensors] if len(models) > 1 else tensors
    if not parts:
        raise CheckpointError(
            f"{path}: no model that kdit knows; its {len(unknown)} tensors are called {samples(unknown)}"
        )
    return FileParts(tuple(parts), tuple(unknown))


def _recognise(path: Path, name: str, tensors: Tensors) -> FilePart | None:
    if network := recognise_network(tensors):
        family, renamed = network
        return FilePart(path, name, family.network_class, renamed, "diffusers", family)
    for family in families():
        if (of_vae := family.vae.recognise(tensors)) is not None:
            return FilePart(path, name, family.vae.class_name, of_vae, "diffusers")
    if encoder := recognise_text_encoder(tensors):
        return FilePart(path, name, *encoder, "transformers")
    return None
