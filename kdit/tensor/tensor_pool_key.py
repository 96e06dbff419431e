"""TensorPoolKey: the address of a tensor within one run. Made from edges, used by pools and pin hubs."""

from dataclasses import dataclass

from kdit.keys import TensorKey

STAGING_NODE_ID = 0  # real nodes count from 1; tensors fed by the caller wait under this id


@dataclass(frozen=True)
class TensorPoolKey:
    """Output pin ``pin`` of the node ``node_id``."""

    node_id: int
    pin: TensorKey

    def __str__(self) -> str:
        return f"{self.node_id}.{self.pin.name}"
