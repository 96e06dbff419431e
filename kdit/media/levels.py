"""Pixels in [0, 1] to the 256 levels that files hold. Called by the SAVE nodes and the contact sheet."""

from __future__ import annotations

import torch
from torch import Tensor

from kdit.errors import NonFiniteError


def to_uint8(pixels: Tensor, what: str = "decoded image") -> Tensor:
    """Pixels in [0, 1] -> 0 to 255 on the CPU, rounded to the nearest; raises NonFiniteError for NaN and infinity."""
    values = pixels.to(torch.float32)
    num_bad = int((~torch.isfinite(values)).sum())
    if num_bad:
        raise NonFiniteError(f"{what}: {num_bad} of {values.numel()} values are NaN or infinite")
    return (values.clamp(0, 1) * 255).round().to(torch.uint8).cpu()
