"""Mlp: two linear layers with an activation between; feed-forward layers and embedders of the networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdit.ops.linear import Linear
from kdit.ops.opset import OpSet

TWICE_U = 2 * math.sqrt(2 / math.pi)  # of GELU's tanh approximation
_LINEAR = torch.tensor(TWICE_U, device="cpu")  # whatever the default is where this is imported


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
    """The tanh approximation of GELU (Hendrycks and Gimpel 2016): x / 2 (1 + tanh u) = x sigmoid(2 u), with
    u = sqrt(2 / pi) (x + 0.044715 x^3).
    """
    if x.device.type != "cpu" or x.dtype is not torch.float32:
        return F.gelu(x, approximate="tanh")
    # On a CPU torch's tanh costs twice what these four passes do, at the same error.
    twice_u = torch.addcmul(_LINEAR, x, x, value=TWICE_U * 0.044715).mul_(x)
    return twice_u.sigmoid_().mul_(x)
