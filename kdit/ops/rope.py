"""Rotary position embedding: tables once per shape, application by complex products."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_frequencies(positions: Tensor, dim: int, theta: float = 10000.0) -> Tensor:
    """Unit complex numbers exp(i * p * theta^(-2j/dim)), j < dim/2 (Su et al. 2021, RoFormer).

    positions [L] -> complex64 [L, dim/2]. Angles are computed in float64.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    angles = torch.outer(positions.to(torch.float64), theta**-exponents)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def rope_table(ids: Tensor, axes_dims: tuple[int, ...], theta: float = 10000.0) -> Tensor:
    """Table for token coordinates on several axes: ids [L, n_axes] -> complex64 [L, sum(axes_dims)/2]."""
    return torch.cat([rope_frequencies(ids[:, i], dim, theta) for i, dim in enumerate(axes_dims)], dim=-1)


def apply_rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotate neighbouring pairs of channels: x [..., L, K], table complex [L, K/2] -> [..., L, K] in x's dtype."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table).flatten(-2).to(x.dtype)
