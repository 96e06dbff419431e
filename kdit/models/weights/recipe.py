"""Recipes: tensors that are made from stored ones while they are read, such as a slice or a scaled weight.

Readers of single files and of fp8 weights write them, TensorReader follows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kdit.models.weights.header import TensorInfo

if TYPE_CHECKING:  # headers are read without torch
    from torch import Tensor

Fetch: TypeAlias = "Callable[[TensorInfo], Tensor]"
"""Reads a tensor that has no recipe."""
Spans = tuple[tuple[int, int], ...]
"""Ranges of rows (indices along dim 0) in the order in which they are joined."""


class Recipe(Protocol):
    """How a tensor is made."""

    def read(self, fetch: Fetch, spans: Spans | None) -> Tensor:
        """The tensor, or only those rows of it."""


def read_tensor(info: TensorInfo, fetch: Fetch, spans: Spans | None = None) -> Tensor:
    """Fetch a tensor or follow its recipe; a view of the file's pages wherever the recipe allows it."""
    if info.recipe is not None:
        return info.recipe.read(fetch, spans)
    return take_rows(fetch(info), spans)


def take_rows(tensor: Tensor, spans: Spans | None) -> Tensor:
    """Those rows; a view if they are in one piece."""
    if spans is None:
        return tensor
    pieces = [tensor[start:stop] for start, stop in spans]
    if len(pieces) == 1:
        return pieces[0]
    import torch

    return torch.cat(pieces)


@dataclass(frozen=True)
class Derived:
    """Another tensor under a name of its own: whole or some of its rows, perhaps in another shape."""

    source: TensorInfo
    spans: Spans | None
    shape: tuple[int, ...]

    def read(self, fetch: Fetch, spans: Spans | None) -> Tensor:
        """Slices before anything is computed."""
        tensor = read_tensor(self.source, fetch, self.spans).reshape(self.shape)
        return take_rows(tensor, spans)


@dataclass(frozen=True)
class Scaled:
    """A weight that is stored divided by a scale: one for all of it, or one per row."""

    weight: TensorInfo
    scale: TensorInfo

    def read(self, fetch: Fetch, spans: Spans | None) -> Tensor:
        """weight * scale in float32: rounded once, when it is copied to its place."""
        weight = read_tensor(self.weight, fetch, spans).float()
        scale = fetch(self.scale).float().flatten()
        if scale.numel() > 1:
            scale = take_rows(scale, spans)
        return weight * scale.view(-1, *(1,) * (weight.dim() - 1)) if weight.dim() else weight * scale[0]


def derived(
    name: str, source: TensorInfo, spans: Spans | None = None, shape: tuple[int, ...] | None = None
) -> TensorInfo:
    """The entry for a Derived tensor; by default with the shape that the rows have."""
    rows = source.shape if spans is None else (sum(b - a for a, b in spans), *source.shape[1:])
    shape = rows if shape is None else shape
    assert math.prod(shape) == math.prod(rows), f"{name}: {rows} cannot have the shape {shape}"
    row_bytes = source.num_bytes // source.shape[0] if spans else 0
    start = source.start + row_bytes * (spans[0][0] if spans else 0)
    end = start + row_bytes * rows[0] if spans else source.end
    return source._replace(name=name, shape=shape, start=start, end=end, recipe=Derived(source, spans, shape))
