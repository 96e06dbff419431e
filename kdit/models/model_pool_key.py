"""ModelPoolKey: the address of a loaded model. Made from edges, used by the ModelPool and pin hubs."""

from dataclasses import dataclass

from kdit.keys import ModelKey


@dataclass(frozen=True)
class ModelPoolKey:
    """Model ``pin`` as loaded by the node ``node_id``."""

    node_id: int
    pin: ModelKey

    def __str__(self) -> str:
        return f"{self.node_id}.{self.pin.name}"
