"""Pins: what a node declares (PinDef), where an edge ends (PinRef), and what is bound at run time (PoolKey)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kdit.errors import GraphError
from kdit.keys import ModelKey, TensorKey
from kdit.models.model_pool_key import ModelPoolKey
from kdit.tensor.tensor_pool_key import TensorPoolKey

PinDef = TensorKey | ModelKey
PoolKey = TensorPoolKey | ModelPoolKey
InputPins = dict[PinDef, PoolKey]  # input pin of a node -> output of an earlier node
OutputPins = dict[PinDef, PoolKey]  # output pin of a node -> where it has been written


@dataclass(frozen=True)
class PinRef:
    """One pin of one node; ``a.IMAGE >> b.START_IMG`` connects two of them in their builder."""

    node_id: int
    pin: PinDef
    connector: Callable[[PinRef, PinRef], None] | None = field(default=None, compare=False, repr=False)

    def __rshift__(self, other: PinRef) -> None:
        """Connect this output to the input ``other``."""
        if self.connector is None:
            raise GraphError(f"{self} >> {other}: the left pin belongs to no builder")
        self.connector(self, other)

    def __str__(self) -> str:
        return f"{self.node_id}.{self.pin.name}"


def pool_key(node_id: int, pin: PinDef) -> PoolKey:
    """Where the node ``node_id`` writes its output ``pin``."""
    return TensorPoolKey(node_id, pin) if isinstance(pin, TensorKey) else ModelPoolKey(node_id, pin)
