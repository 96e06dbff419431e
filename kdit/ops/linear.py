"""Linear: the only matrix product with weights in the networks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdit.ops.opset import OpSet


class Linear(nn.Linear):
    """``nn.Linear`` whose rows can be computed one by one.

    Matrix libraries choose their blocking, and so their order of summation, by the number of rows of
    the whole product. With ``ops.batch_invariant`` each entry of dim 0 is a product of its own, of a
    size that does not depend on what it is batched with.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, ops: OpSet) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """x [R, ..., in] -> [R, ..., out]."""
        return linear(x, self.weight, self.bias, ops=self.ops)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, ops: OpSet) -> Tensor:
    """x [R, ..., in] @ weight [out, in] + bias, row by row if ``ops.batch_invariant``."""
    if ops.batch_invariant and x.shape[0] > 1:
        return torch.cat([F.linear(row, weight, bias) for row in x.split(1)])
    return F.linear(x, weight, bias)
