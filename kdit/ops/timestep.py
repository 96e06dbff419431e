"""Sinusoidal embedding of scalars: timesteps and guidance values."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def timestep_embedding(t: Tensor, dim: int, max_period: float = 10000.0) -> Tensor:
    """t [...] -> float32 [..., dim], cosines first (Vaswani et al. 2017; cosine-first as in Ho et al. 2020's code)."""
    half = dim // 2
    exponent = -math.log(max_period) * torch.arange(half, dtype=torch.float32, device=t.device) / half
    angles = t.float()[..., None] * torch.exp(exponent)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
