"""GridLatents: the public form of latents that stay a grid. Families whose networks read a grid build on it."""

from __future__ import annotations

from torch import Tensor

from kdit.errors import InputError
from kdit.models.rows import LatentShape


class GridLatents:
    """The part of a ``LatentForm`` that says: in public as on the pins."""

    def to_public(self, latents: Tensor) -> Tensor:
        """As they are."""
        return latents

    def from_public(self, latents: Tensor, shape: LatentShape) -> Tensor:
        """As they are, if they have the shape."""
        if tuple(latents.shape[1:]) != tuple(shape):
            raise InputError(f"latents have shape {tuple(latents.shape)}, expected [B, {', '.join(map(str, shape))}]")
        return latents
