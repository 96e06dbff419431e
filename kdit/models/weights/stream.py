"""WeightStream: weights that are in memory only while a request is prepared. Made by ``load_network``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from kdit.errors import CheckpointError
from kdit.models.weights.load_tensors import Wanted, load_tensors
from kdit.models.weights.plan import Placement


class _Stamp(NamedTuple):
    """What tells that a file was replaced."""

    size: int
    time: int


class _Leaf(NamedTuple):
    """One module that holds streamed parameters itself."""

    module: nn.Module
    empty: dict[str, nn.Parameter]  # on the meta device, by their names in the module
    wanted: dict[str, Wanted]  # by the same names
    placements: tuple[Placement, ...]  # whose targets are these names


class WeightStream:
    """Loads the parameters of each module right before it computes and drops them right after.

    So the modulation weights, a quarter to a third of a large model, never are in memory together, and none
    of them during the loop.
    """

    def __init__(
        self, net: nn.Module, wanted: Mapping[str, Wanted], placements: Sequence[Placement], device: torch.device
    ) -> None:
        """``wanted``: the streamed parameters of ``net``, which are on the meta device. ``placements`` fill them."""
        self._device = device
        self._stamps = {path: _stamp(path) for path in {p.source.path for p in placements}}
        found = (_leaf(name, module, wanted, placements) for name, module in net.named_modules())
        self._leaves = [leaf for leaf in found if leaf is not None]
        self._held = False
        for leaf in self._leaves:
            leaf.module.register_forward_pre_hook(partial(self._before, leaf))
            leaf.module.register_forward_hook(partial(self._after, leaf))

    @contextmanager
    def open(self, *, hold: bool) -> Iterator[None]:
        """Around a preparation. ``hold``: its modules run many times, so keep what was loaded until the end.

        Raises CheckpointError if a file was changed since the network was loaded from it.
        """
        for path, stamp in self._stamps.items():
            if _stamp(path) != stamp:
                raise CheckpointError(f"{path} changed since the model was loaded from it; load the model again")
        self._held = hold
        try:
            yield
        finally:
            self._held = False
            for leaf in self._leaves:
                _drop(leaf)

    def _before(self, leaf: _Leaf, _module: nn.Module, _args: object) -> None:
        if next(iter(leaf.module.parameters(recurse=False))).is_meta:
            with torch.inference_mode(False), torch.no_grad():
                for name, tensor in load_tensors(leaf.wanted, leaf.placements, self._device).items():
                    setattr(leaf.module, name, nn.Parameter(tensor, requires_grad=False))

    def _after(self, leaf: _Leaf, _module: nn.Module, _args: object, _out: object) -> None:
        if not self._held:
            _drop(leaf)


def _drop(leaf: _Leaf) -> None:
    for name, empty in leaf.empty.items():
        setattr(leaf.module, name, empty)


def _leaf(path: str, module: nn.Module, wanted: Mapping[str, Wanted], placements: Sequence[Placement]) -> _Leaf | None:
    own = {name: parameter for name, parameter in module.named_parameters(recurse=False)}
    streamed = {f"{path}.{name}": name for name in own if f"{path}.{name}" in wanted}
    if not streamed:
        return None
    assert len(streamed) == len(own), f"{path} is streamed in part: {sorted(streamed)} of {sorted(own)}"
    return _Leaf(
        module,
        own,
        {name: wanted[target] for target, name in streamed.items()},
        tuple(p._replace(target=streamed[p.target]) for p in placements if p.target in streamed),
    )


def _stamp(path: Path) -> _Stamp | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return _Stamp(stat.st_size, stat.st_mtime_ns)
