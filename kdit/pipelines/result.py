"""GenerateResult: what a finished request gives back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """Pictures, latents and how they came about."""

    pixels: Tensor | None  # [B, H, W, 3] float32 in [0, 1]; None for videos, and if the request stopped at the latents
    latents: Tensor  # as diffusers returns them for output_type="latent"
    seeds: tuple[int, ...]
    settings: dict[str, object]  # effective settings, model and its hash, JSON-able
    timings: dict[str, float]  # seconds by stage
    notices: tuple[str, ...]  # what was asked for and had no effect, what was cut
    video: Tensor | None = None  # [B, F, H, W, 3] float32 in [0, 1]; families that make video
    audio: Tensor | None = None  # [B, channels, samples]; families that make sound

    @cached_property
    def images(self) -> list[Image]:
        """One PIL image per sample; empty if the request stopped at the latents."""
        if self.pixels is None:
            return []
        from PIL import Image

        levels = (self.pixels.clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
        return [Image.fromarray(array) for array in levels]
