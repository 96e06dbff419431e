"""Samples of one side, and the times of its stages. Used by both sides and by compare.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TEXT, LOOP, DECODE, TOTAL = "text_encode", "loop", "decode", "total"
STAGES = (TEXT, LOOP, DECODE, TOTAL)


@dataclass(frozen=True)
class Sample:
    """One finished request."""

    seconds: Mapping[str, float]  # by stage
    latents: Tensor  # after the last step, in the reference library's form
    pixels: Tensor  # [B, (F,) H, W, 3] in [0, 1]
