"""run_stack: the one block loop of the project, and the gate through which step caches skip part of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from kdit.models.network import Network
from kdit.models.rows import Rows, Streams
from kdit.parallel import Group

VOTE_AXES = ("tp", "ulysses", "ring")


class StackGate(Protocol):
    """A step cache as the block loop sees it.

    ``taps`` are positions in the stack; position i lies before block i. The first is where the gate
    decides, the optional second where a skipped row comes back in (default: after the last block).
    """

    taps: tuple[int, ...]

    def record(self, tap: int, x: Streams, rows: Rows) -> None:
        """Called with all rows at position 0, and with the computed rows where skipped ones come back."""

    def decide(self, tap: int, x: Streams, rows: Rows, vote: Group) -> Tensor:
        """One bool per row [R]: True computes the row. All ranks of ``vote`` must return the same."""

    def reuse(self, tap: int, x: Streams, rows: Rows) -> Streams:
        """Tokens of the skipped rows at the position where they come back, from theirs at the first tap."""


def run_stack(net: Network, rows: Rows, gate: StackGate | None = None, *, skip: Collection[int] = ()) -> Streams:
    """Embed the rows and run all blocks, less those in ``skip`` and those that the gate lets a row skip."""
    x = net.embed(rows)
    end = len(net.blocks)
    if gate is None:
        return _run_blocks(net, x, rows, 0, end, skip)
    assert not skip, "a step cache does not know what a pass without some blocks gives"
    decide_at, resume_at = (*gate.taps, end)[:2]
    gate.record(0, x, rows)
    x = _run_blocks(net, x, rows, 0, decide_at)
    keep = gate.decide(decide_at, x, rows, net.ops.mesh.group(*VOTE_AXES))
    x = _run_gated(net, x, rows, keep, decide_at, resume_at, gate)
    return _run_blocks(net, x, rows, resume_at, end)


def predict(
    net: Network,
    rows: Rows,
    gate: StackGate | None = None,
    *,
    skip: Collection[int] = (),
    max_rows: int | None = None,
) -> Tensor:
    """The network's prediction for each row, in one forward or in several of at most ``max_rows`` rows.

    Row by row if the network is batch-invariant. ``skip``: blocks to leave out.
    """
    count = len(rows.index)
    most = 1 if net.ops.batch_invariant else max_rows or count
    if most < count:
        parts = (rows.narrow(start, min(most, count - start)) for start in range(0, count, most))
        return torch.cat([predict(net, part, gate, skip=skip, max_rows=most) for part in parts])
    return net.head(run_stack(net, rows, gate, skip=skip), rows)


def _run_blocks(net: Network, x: Streams, rows: Rows, start: int, stop: int, skip: Collection[int] = ()) -> Streams:
    for i in range(start, stop):
        if i not in skip:
            x = net.blocks[i](x, rows.mod[i], rows)
    return x


def _run_gated(
    net: Network, x: Streams, rows: Rows, keep: Tensor, decide_at: int, resume_at: int, gate: StackGate
) -> Streams:
    if bool(keep.all()):
        x = _run_blocks(net, x, rows, decide_at, resume_at)
        gate.record(resume_at, x, rows)
        return x
    if not bool(keep.any()):
        return gate.reuse(resume_at, x, rows)
    computed_rows, skipped_rows = rows.select(keep), rows.select(~keep)
    computed = _run_blocks(net, _pick(x, keep), computed_rows, decide_at, resume_at)
    gate.record(resume_at, computed, computed_rows)
    return _merge(keep, computed, gate.reuse(resume_at, _pick(x, ~keep), skipped_rows))


def _pick(x: Streams, keep: Tensor) -> Streams:
    return Streams(x.img[keep], None if x.txt is None else x.txt[keep])


def _merge(keep: Tensor, computed: Streams, skipped: Streams) -> Streams:
    def join(a: Tensor, b: Tensor) -> Tensor:
        out = torch.empty((keep.shape[0], *a.shape[1:]), dtype=a.dtype, device=a.device)
        out[keep], out[~keep] = a, b
        return out

    txt = None if computed.txt is None or skipped.txt is None else join(computed.txt, skipped.txt)
    return Streams(join(computed.img, skipped.img), txt)
