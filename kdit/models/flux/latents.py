"""Packing of FLUX.1 latents: 2x2 neighbours become one token."""

from __future__ import annotations

from torch import Tensor

from kdit.ops.patch import patchify


def pack(latents: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H/2 * W/2, 4 C]."""
    return patchify(latents, (2, 2))


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """[B, H/2 * W/2, 4 C] -> [B, C, H, W] for a latent grid of ``height`` x ``width``."""
    b, _, channels = tokens.shape
    grid = tokens.view(b, height // 2, width // 2, channels // 4, 2, 2)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(b, channels // 4, height, width)
