"""Small pictures for the tests of SD3's image to image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def picture(file: Path, size: tuple[int, int], seed: int) -> str:
    """A file of coloured squares of 8 pixels, ``size`` (width, height)."""
    width, height = size
    levels = np.random.default_rng(seed).integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    Image.fromarray(levels.repeat(8, axis=0).repeat(8, axis=1)[:height, :width].copy()).save(file)
    return str(file)
