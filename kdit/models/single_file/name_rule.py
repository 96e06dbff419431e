"""NameRule: one row of a table that gives the tensors of another layout the names that diffusers gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from kdit.errors import CheckpointError
from kdit.models.weights.header import TensorInfo
from kdit.models.weights.recipe import Spans, derived

Change = Literal["swap_halves", "drop_ones"] | None


class NameRule(NamedTuple):
    """``stored`` becomes ``names``: several names share its rows in this order, in the proportion ``parts``.

    ``{}`` in the names stands for an index. ``change``: "swap_halves" puts the second half of the rows first
    (shift, scale to scale, shift); "drop_ones" drops dimensions of size 1 (a 1x1 convolution is a linear layer).
    """

    stored: str
    names: tuple[str, ...]
    parts: tuple[int, ...] = (1,)
    change: Change = None


def named(stored: str, *names: str, parts: tuple[int, ...] = (), change: Change = None) -> tuple[NameRule, ...]:
    """The rule for one tensor; ``parts``: equal by default."""
    return (NameRule(stored, names, parts or (1,) * len(names), change),)


def layer(stored: str, *names: str, parts: tuple[int, ...] = (), change: Change = None) -> tuple[NameRule, ...]:
    """The rules for the weight and bias of a linear layer or convolution."""
    parts = parts or (1,) * len(names)
    return tuple(
        NameRule(f"{stored}.{leaf}", tuple(f"{name}.{leaf}" for name in names), parts, change)
        for leaf in ("weight", "bias")
    )


def rename(tensors: Mapping[str, TensorInfo], rules: tuple[NameRule, ...]) -> dict[str, TensorInfo]:
    """The tensors under their names in diffusers. One that no rule knows keeps its name, so that it is told of."""
    patterns = [(re.compile(re.escape(rule.stored).replace(r"\{\}", r"(\d+)")), rule) for rule in rules]
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        match, rule = next(((m, rule) for pattern, rule in patterns if (m := pattern.fullmatch(name))), (None, None))
        if match is None or rule is None:
            found[name] = derived(name, info)
            continue
        for target, spans in zip(rule.names, _spans(info, rule), strict=True):
            new = target.format(*match.groups())
            shape = tuple(n for n in info.shape if n != 1) if rule.change == "drop_ones" else None
            found[new] = derived(new, info, spans, shape)
    return found


def _spans(info: TensorInfo, rule: NameRule) -> list[Spans | None]:
    total = 2 if rule.change == "swap_halves" else sum(rule.parts)
    if total == 1:
        return [None]
    if not info.shape or info.shape[0] % total:
        raise CheckpointError(
            f"{info.path}: {info.name} has the shape {list(info.shape)}, expected rows in a multiple of {total},"
            f" to be split into {', '.join(rule.names)}"
        )
    unit = info.shape[0] // total
    if rule.change == "swap_halves":
        return [((unit, 2 * unit), (0, unit))]
    ends = [unit * sum(rule.parts[: i + 1]) for i in range(len(rule.parts))]
    return [((start, end),) for start, end in zip((0, *ends), ends, strict=False)]
