"""Mlp: two linear layers with an activation between; feed-forward layers and embedders of the networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from kdit.ops.linear import Linear
from kdit.ops.opset import OpSet


class Mlp(nn.Module):
    """``fc_out(act(fc_in(x)))``."""

    def __init__(self, in_dim: int, hidden: int, out_dim: int, *, act: Callable[[Tensor], Tensor], ops: OpSet) -> None:
        super().__init__()
        self.fc_in = Linear(in_dim, hidden, ops=ops)
        self.fc_out = Linear(hidden, out_dim, ops=ops)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """[R, ..., in_dim] -> [R, ..., out_dim]."""
        return self.fc_out(self.act(self.fc_in(x)))

    if TYPE_CHECKING:  # nn.Module types its calls as Any

        def __call__(self, x: Tensor) -> Tensor:
            """As ``forward``."""


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")
