"""Prompts and stand-ins for images, clips, noise and MiniMax-H3 references that cases are written with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

SHORT = "a red fox"
LONG = "two small boats drift under a stone bridge at dawn, painted in soft watercolour"
NEGATIVE = "blurry, low quality"
EDIT = "make the sky orange and add a kite"


@dataclass(frozen=True)
class Picture:
    """A deterministic RGB (or mask) image, written to the case folder as PNG."""

    width: int
    height: int
    seed: int = 0
    mask: bool = False

    def render(self) -> Image.Image:
        """Smooth colour gradients plus a few flat rectangles, so that a resize or crop shows."""
        rng = np.random.default_rng(1000 + self.seed)
        y, x = np.mgrid[0 : self.height, 0 : self.width].astype(np.float64)
        x, y = x / self.width, y / self.height
        if self.mask:
            left, top = rng.uniform(0.1, 0.3, 2)
            inside = (x > left) & (x < left + 0.5) & (y > top) & (y < top + 0.45)
            return Image.fromarray((inside * 255).astype(np.uint8), mode="L").convert("RGB")
        channels = []
        for _ in range(3):
            fx, fy, phase = rng.uniform(0.5, 3, 3)
            channels.append(0.5 + 0.45 * np.sin(2 * math.pi * (fx * x + fy * y) + phase))
        image = np.stack(channels, -1)
        for _ in range(4):
            left, top, w, h = rng.uniform(0, 0.7, 4)
            inside = (x > left) & (x < left + w) & (y > top) & (y < top + h)
            image[inside] = rng.uniform(0, 1, 3)
        return Image.fromarray((image * 255).round().astype(np.uint8))


@dataclass(frozen=True)
class Clip:
    """A list of frames (or mask frames)."""

    width: int
    height: int
    frames: int
    seed: int = 0
    mask: bool = False

    def pictures(self) -> list[Picture]:
        return [Picture(self.width, self.height, 100 * self.seed + i, self.mask) for i in range(self.frames)]


@dataclass(frozen=True)
class Noise:
    """A standard-normal tensor passed explicitly as ``latents`` (or another argument)."""

    shape: tuple[int, ...]
    seed: int = 7

    def draw(self) -> torch.Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(self.seed))


@dataclass(frozen=True)
class Reference:
    """A MiniMax-H3 ``ref2va`` reference: ``kind`` is image, video or audio."""

    kind: str
    width: int = 96
    height: int = 64
    frames: int = 0
    seconds: float = 0.0
    seed: int = 0
