"""WeightRule: one row of the table that maps a checkpoint's tensors to a network's parameters."""

from __future__ import annotations

from typing import Literal, NamedTuple


class WeightRule(NamedTuple):
    """``sources`` of the checkpoint are joined into the parameter ``target``.

    ``{}`` in the names stands for a block's index. ``parts`` are the relative sizes of the parts along
    the joined or sharded dimension (0 for "col" and None, 1 for "row"): q, k, v of a fused projection are
    (1, 1, 1). Each part is sharded by itself, and an adapter made for one source finds its slice by it.
    """

    target: str
    sources: tuple[str, ...]
    shard: Literal["col", "row"] | None = None
    parts: tuple[int, ...] = (1,)


def plain(target: str, source: str, *, shard: Literal["col", "row"] | None = None) -> tuple[WeightRule, ...]:
    """Rules for the weight and bias of one linear layer or convolution."""
    return tuple(WeightRule(f"{target}.{leaf}", (f"{source}.{leaf}",), shard) for leaf in ("weight", "bias"))


def fused(
    target: str, sources: tuple[str, ...], *, parts: tuple[int, ...], shard: Literal["col", "row"] | None = "col"
) -> tuple[WeightRule, ...]:
    """Rules for the weight and bias of several linear layers fused along their outputs."""
    return tuple(
        WeightRule(f"{target}.{leaf}", tuple(f"{source}.{leaf}" for source in sources), shard, parts)
        for leaf in ("weight", "bias")
    )
