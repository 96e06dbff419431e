"""Patches: a grid of latents as a sequence of tokens, and back. Any number of grid axes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kdit.ops.linear import linear
from kdit.ops.opset import OpSet


def patchify(x: Tensor, patch: tuple[int, ...]) -> Tensor:
    """[R, C, *size] -> [R, L, C * prod(patch)]: patches in row-major order, channels slowest within one."""
    n = len(patch)
    split = [part for size, p in zip(x.shape[2:], patch, strict=True) for part in (size // p, p)]
    grid = [2 + 2 * i for i in range(n)]
    inner = [3 + 2 * i for i in range(n)]
    return x.reshape(*x.shape[:2], *split).permute(0, *grid, 1, *inner).flatten(1 + n).flatten(1, n)


def unpatchify(tokens: Tensor, patch: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """[R, L, prod(patch) * C] -> [R, C, *size]; within a token the channels are fastest."""
    n = len(patch)
    grid = [s // p for s, p in zip(size, patch, strict=True)]
    x = tokens.reshape(tokens.shape[0], *grid, *patch, -1)
    pairs = [axis for i in range(n) for axis in (1 + i, 1 + n + i)]
    return x.permute(0, 1 + 2 * n, *pairs).reshape(x.shape[0], -1, *size)


class PatchEmbed(nn.Module):
    """Patches to hidden tokens. The weight has a convolution's shape, the product is a linear layer's."""

    def __init__(self, in_channels: int, dim: int, patch: tuple[int, ...], *, ops: OpSet) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, in_channels, *patch))
        self.bias = nn.Parameter(torch.zeros(dim))
        nn.init.normal_(self.weight, std=(in_channels * math.prod(patch)) ** -0.5)
        self.ops = ops

    def forward(self, patches: Tensor) -> Tensor:
        """[R, L, C * prod(patch)] as ``patchify`` makes them -> [R, L, D]."""
        return linear(patches, self.weight.flatten(1), self.bias, ops=self.ops)

    def share(self, patches: Tensor, channels: slice, *, bias: bool) -> Tensor:
        """What some of the input channels add to the tokens: patches [R, L, c * prod(patch)] of these -> [R, L, D].

        The shares of all channels, one of them with the bias, sum up to what ``forward`` gives.
        """
        return linear(patches, self.weight[:, channels].flatten(1), self.bias if bias else None, ops=self.ops)
