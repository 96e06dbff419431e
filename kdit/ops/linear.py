"""Linear: the only matrix product with weights in the networks, so that sharding has one place to act."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from kdit.ops.half_precision import needs_widening, widened_linear
from kdit.ops.opset import OpSet


class Linear(nn.Linear):
    """``nn.Linear`` that knows the operators and the mesh of its network."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, ops: OpSet) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """x [R, ..., in] -> [R, ..., out]."""
        return linear(x, self.weight, self.bias, ops=self.ops)

    if TYPE_CHECKING:  # nn.Module types its calls as Any

        def __call__(self, x: Tensor) -> Tensor:
            """As ``forward``."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, ops: OpSet) -> Tensor:
    """x [R, ..., in] @ weight [out, in] + bias."""
    if needs_widening(x):
        return widened_linear(x, weight, bias)
    # Of rows that are slices of longer ones torch makes a batch of small products, which costs more than the copy.
    return F.linear(x.contiguous(), weight, bias)
