"""Packing of FLUX.1 latents: 2x2 neighbours become one token."""

from __future__ import annotations

from torch import Tensor


def pack(latents: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H/2 * W/2, 4 C]."""
    b, c, h, w = latents.shape
    return latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """[B, H/2 * W/2, 4 C] -> [B, C, H, W] for a latent grid of ``height`` x ``width``."""
    b, _, channels = tokens.shape
    grid = tokens.view(b, height // 2, width // 2, channels // 4, 2, 2)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(b, channels // 4, height, width)
