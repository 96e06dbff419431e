"""Rows: what one denoising step is computed on. One row is one (sample, guidance branch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kdit.ops.attention import SeqLayout

Cond = Mapping[str, Tensor]
"""Conditioning of a network as its family names it (text embeddings, pooled text, guidance ...); dim 0 = row."""

LatentShape = tuple[int, ...]
"""Shape of one sample's latents without the batch: (C, H, W) or (C, F, H, W), in latent units."""


class Streams(NamedTuple):
    """Hidden tokens between blocks: img [R, Li, D], txt [R, Lt, D] or None once no block reads it."""

    img: Tensor
    txt: Tensor | None


class ModTable(NamedTuple):
    """Modulation vectors of all steps: one tensor [steps, R, n, D] per block, then one for the head."""

    rows: tuple[Tensor, ...]

    def at(self, step_index: int) -> tuple[Tensor, ...]:
        """The vectors of one step: tensors [R, n, D]."""
        return tuple(table[step_index] for table in self.rows)

    def narrow(self, start: int, count: int) -> ModTable:
        """The tables of rows start .. start+count, as views."""
        return ModTable(tuple(table.narrow(1, start, count) for table in self.rows))

    @staticmethod
    def stack(tables: Sequence[ModTable]) -> ModTable:
        """Join along the steps."""
        return ModTable(tuple(torch.cat(parts) for parts in zip(*(t.rows for t in tables), strict=True)))

    @staticmethod
    def cat(tables: Sequence[ModTable]) -> ModTable:
        """Join along the rows."""
        return ModTable(tuple(torch.cat(parts, dim=1) for parts in zip(*(t.rows for t in tables), strict=True)))


@dataclass(frozen=True)
class Static:
    """What ``Network.prepare_static`` computed once per request.

    ``rows`` differ from row to row (dim 0 = R); ``shared`` depend on shapes alone and are equal for all
    rows that may share a step.
    """

    layout: SeqLayout
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    shared: Mapping[str, Tensor] = field(default_factory=dict)

    def narrow(self, start: int, count: int) -> Static:
        """Rows start .. start+count, as views."""
        layout = self.layout._replace(
            img=self.layout.img[start : start + count], txt=self.layout.txt[start : start + count]
        )
        return Static(layout, {k: v.narrow(0, start, count) for k, v in self.rows.items()}, self.shared)

    def select(self, index: Sequence[int]) -> Static:
        """The rows at ``index``, in that order."""
        layout = self.layout._replace(
            img=tuple(self.layout.img[i] for i in index), txt=tuple(self.layout.txt[i] for i in index)
        )
        return Static(layout, {k: v[list(index)] for k, v in self.rows.items()}, self.shared)

    @staticmethod
    def cat(parts: Sequence[Static]) -> Static:
        """Join rows of requests with equal shapes."""
        first = parts[0]
        if len(parts) == 1:
            return first
        assert all(p.layout.padded == first.layout.padded for p in parts), "rows of different shapes in one batch"
        img, txt = sum((p.layout.img for p in parts), ()), sum((p.layout.txt for p in parts), ())
        layout = first.layout._replace(img=img, txt=txt)
        return Static(layout, {k: torch.cat([p.rows[k] for p in parts]) for k in first.rows}, first.shared)


@dataclass(frozen=True)
class Rows:
    """Everything a forward of the stack reads."""

    latents: Tensor  # [R, ...] as the family's LatentHandler packs them
    mod: tuple[Tensor, ...]  # [R, n, D] per block, then the head's
    static: Static
    index: tuple[int, ...]  # position of each row in the step batch; step caches find their state by it

    @property
    def layout(self) -> SeqLayout:
        """Sequence lengths of these rows."""
        return self.static.layout

    def narrow(self, start: int, count: int) -> Rows:
        """Rows start .. start+count, as views."""
        return Rows(
            self.latents.narrow(0, start, count),
            tuple(m.narrow(0, start, count) for m in self.mod),
            self.static.narrow(start, count),
            self.index[start : start + count],
        )

    def select(self, keep: Tensor) -> Rows:
        """The rows where the boolean tensor ``keep`` [R] is true."""
        chosen = keep.nonzero().flatten().tolist()
        return Rows(
            self.latents[chosen],
            tuple(m[chosen] for m in self.mod),
            self.static.select(chosen),
            tuple(self.index[i] for i in chosen),
        )
