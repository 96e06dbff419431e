"""Fills a network from a reference module's state dict by the network's own table of names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kdit.models.network import Network
from kdit.models.weight_rule import WeightRule
from kdit.ops.opset import OpSet


def match(pattern: str, name: str) -> str | None:
    """The index that ``{}`` stands for ("" if there is none), or None if the name does not match."""
    head, brace, tail = pattern.partition("{}")
    if not brace:
        return "" if name == pattern else None
    index = name[len(head) : len(name) - len(tail)]
    return index if index.isdecimal() and name == f"{head}{index}{tail}" else None


def sources_of(net: Network) -> dict[str, tuple[str, ...]]:
    """Checkpoint names for each parameter of ``net``; a parameter needs exactly one rule."""
    found: dict[str, tuple[str, ...]] = {}
    for target, _ in net.named_parameters():
        hits: list[tuple[WeightRule, str]] = [(r, i) for r in net.rules if (i := match(r.target, target)) is not None]
        assert len(hits) == 1, f"{target} has {len(hits)} rules"
        rule, index = hits[0]
        found[target] = tuple(source.replace("{}", index) for source in rule.sources)
    return found


def fill(net: Network, state: Mapping[str, Tensor]) -> None:
    """Copy ``state`` into ``net``; every tensor is used exactly once."""
    sources = sources_of(net)
    with torch.no_grad():
        for target, parameter in net.named_parameters():
            value = torch.cat([state[name] for name in sources[target]])
            assert value.shape == parameter.shape, f"{target}: {tuple(value.shape)} for {tuple(parameter.shape)}"
            parameter.copy_(value)
    used = Counter(name for names in sources.values() for name in names)
    assert used == Counter(state.keys()), f"not used exactly once: {set(state) ^ set(used) or used}"


def twin(network: type[Network], reference: nn.Module, *, ops: OpSet | None = None) -> Network:
    """The network with the configuration and the weights of a diffusers module."""
    config: dict[str, Any] = dict(reference.config)  # type: ignore[arg-type]
    net = network.from_config(config, ops=ops or OpSet())
    fill(net, reference.state_dict())
    return net.eval().requires_grad_(False)


def randomise(module: nn.Module, seed: int) -> nn.Module:
    """Random values in every parameter and stored buffer, none zero and no norm scale one; eval mode, no gradients."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in module.state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        if value.dim() == 1:
            value.copy_(noise * 0.1 + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
        elif "table" in name or "pos_embed.pos_embed" in name:
            value.copy_(noise * 0.3)
        else:
            value.copy_(noise * value[0].numel() ** -0.5)
    return module.eval().requires_grad_(False)


def distance(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected| over the whole tensor; wrong shapes fail."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    return float((got - expected).norm() / expected.norm())
