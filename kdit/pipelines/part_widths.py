"""Whether encoders and autoencoder have the widths that the network reads. Called by pipelines/defs before loading."""

from __future__ import annotations

from collections.abc import Sequence

from kdit.errors import CheckpointError
from kdit.models.checkpoint import Checkpoint


def check_width(checkpoint: Checkpoint, names: Sequence[str], key: str, width: int, needed_as: str) -> None:
    """``key`` of these components, added up, must be ``width``, which the network's config has as ``needed_as``.

    A component that is left out, and one whose config leaves ``key`` to the library, is not judged. Raises
    CheckpointError.
    """
    held = {name: checkpoint.components[name] for name in names if name in checkpoint.components}
    found = {name: value for name, part in held.items() if isinstance(value := part.config.get(key), int)}
    if len(found) < len(names) or sum(found.values()) == width:
        return
    stated = ", ".join(f"{name} ({held[name].path}) has {key} {value}" for name, value in found.items())
    together = "together " if len(found) > 1 else ""
    raise CheckpointError(f"{stated}; the transformer needs {together}{width} ({needed_as}): they are not of one model")
