"""plan_weights: which tensor of the files goes where in a network, checked before anything is allocated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from kdit.errors import CheckpointError
from kdit.models.network import Network
from kdit.models.weight_rule import WeightRule
from kdit.models.weights.header import BITS, TensorInfo
from kdit.models.weights.weight_files import FLOAT_DTYPES, WeightFiles, samples


class Placement(NamedTuple):
    """One source tensor and the slice of a parameter that it fills."""

    source: TensorInfo
    target: str
    dim: int
    offset: int


def plan_weights(net: Network, weights: WeightFiles) -> tuple[Placement, ...]:
    """Where each tensor goes, for every parameter of ``net`` (which may be on the meta device).

    The sources of a rule join along dim 0, those of a "row" rule along dim 1. Raises CheckpointError
    naming the tensors that are missing, left over, not floating point, or of another shape than expected.
    Those that ``net`` ignores are not left over.
    """
    parameters = dict(net.named_parameters())
    bound = dict(_bind_rules(net.rules, parameters))
    unruled = parameters.keys() - bound.keys()
    assert not unruled, f"{type(net).__name__}: no WeightRule for {sorted(unruled)}"
    _check_names(net, bound, weights)
    _check_dtypes(weights)
    return tuple(
        placement
        for name, rule in bound.items()
        for placement in _place(name, parameters[name], rule, [weights.tensors[source] for source in rule.sources])
    )


def kept_dtype(net: Network, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the parameter ``name`` where the network is loaded in ``dtype``."""
    kept = any(_pattern(path, below=True).fullmatch(name) for path in net.float32)
    return torch.float32 if kept else dtype


def _pattern(name: str, *, below: bool = False) -> re.Pattern[str]:
    """``name``, where each ``{}`` is a block's index; ``below``: also what lies in the module of that name."""
    return re.compile(re.escape(name).replace(r"\{\}", r"(\d+)") + (r"(\..+)?" if below else ""))


def _bind_rules(rules: tuple[WeightRule, ...], parameters: dict[str, nn.Parameter]) -> Iterator[tuple[str, WeightRule]]:
    """(parameter, its rule with block indices filled in); a rule for which there is no parameter gives nothing."""
    taken: set[str] = set()
    for rule in rules:
        pattern = _pattern(rule.target)
        for name in parameters:
            if match := pattern.fullmatch(name):
                assert name not in taken, f"two WeightRules for {name}"
                taken.add(name)
                yield name, rule._replace(target=name, sources=tuple(s.format(*match.groups()) for s in rule.sources))


def _check_names(net: Network, bound: dict[str, WeightRule], weights: WeightFiles) -> None:
    needed = {source for rule in bound.values() for source in rule.sources}
    missing, left_over = needed - weights.tensors.keys(), weights.tensors.keys() - needed
    left_over = {name for name in left_over if not any(_pattern(ignored).fullmatch(name) for ignored in net.ignored)}
    parts = []
    if missing:
        parts.append(f"{len(missing)} of {len(needed)} tensors are missing: {samples(missing)}")
    if left_over:
        parts.append(f"{len(left_over)} tensors have no place in {type(net).__name__}: {samples(left_over)}")
    if parts:
        raise CheckpointError(f"{weights.folder} does not fit its config.json: {'; '.join(parts)}")


def _check_dtypes(weights: WeightFiles) -> None:
    for info in weights.tensors.values():
        if info.dtype in BITS and info.dtype not in FLOAT_DTYPES:  # others are quantised, and decoded as they are read
            raise CheckpointError(
                f"{info.path}: {info.name} has the dtype {info.dtype}, expected one of {', '.join(FLOAT_DTYPES)}"
            )


def _place(name: str, parameter: nn.Parameter, rule: WeightRule, sources: list[TensorInfo]) -> Iterator[Placement]:
    expected = tuple(parameter.shape)
    dim = 1 if rule.shard == "row" and len(expected) > 1 else 0
    assert len(sources) == 1 or rule.shard != "row" or dim, f"{name}: several sources cannot join into a row bias"
    joined = _joined_shape([source.shape for source in sources], dim)
    if joined != expected:
        names = ", ".join(source.name for source in sources)
        got = " + ".join(str(list(source.shape)) for source in sources)
        along = f" when joined along dim {dim}" if len(sources) > 1 else ""
        raise CheckpointError(f"{sources[0].path}: {names} has the shape {got}, expected {list(expected)}{along}")
    offset = 0
    for source in sources:
        yield Placement(source, name, dim, offset)
        offset += source.shape[dim] if source.shape else 0


def _joined_shape(shapes: list[tuple[int, ...]], dim: int) -> tuple[int, ...] | None:
    """Shape of the concatenation, None if the shapes do not go together."""
    first = shapes[0]
    if len(shapes) == 1:
        return first
    if any(len(s) != len(first) or len(s) <= dim for s in shapes):
        return None
    if any(s[:dim] + s[dim + 1 :] != first[:dim] + first[dim + 1 :] for s in shapes):
        return None
    return (*first[:dim], sum(s[dim] for s in shapes), *first[dim + 1 :])
