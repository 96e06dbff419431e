"""prepare_static and prepare_mod: how the generator calls a network's two preparations."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor

from kdit.models.network import Network
from kdit.models.rows import Cond, LatentShape, ModTable, Static


def prepare_static(net: Network, cond: Cond, shape: LatentShape) -> Static:
    """All that no step changes, for every row of ``cond``. Row by row if the network is batch-invariant."""
    if net.ops.batch_invariant:
        return Static.cat([net.prepare_static(row, shape) for row in _rows(cond)])
    return net.prepare_static(cond, shape)


def prepare_mod(net: Network, timesteps: Tensor, cond: Cond) -> ModTable:
    """Modulation vectors of all ``timesteps``. One row and one step at a time if the network is batch-invariant."""
    alone = net.ops.batch_invariant
    with nullcontext() if net.stream is None else net.stream.open(hold=alone):
        if not alone:
            return net.prepare_mod(timesteps, cond)
        columns = [[net.prepare_mod(t, row) for t in timesteps.split(1)] for row in _rows(cond)]
        return ModTable.cat([ModTable.stack(steps) for steps in columns])


def _rows(cond: Cond) -> list[Cond]:
    count = next(iter(cond.values())).shape[0]
    return [{key: value.narrow(0, i, 1) for key, value in cond.items()} for i in range(count)]
