"""FEED_TENSOR: brings a tensor that the caller fed to the engine into the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kdit.errors import ConfigError, PinError
from kdit.keys import IONodeType, TensorKey
from kdit.nodes.core.factory import IONodeFactory
from kdit.nodes.core.metadata import read_metadata
from kdit.nodes.core.node import IONode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.core.pin_hub import PinHub


@dataclass(frozen=True)
class FeedSettings:
    """``key``: which fed tensor this node brings in, and the output that carries it."""

    key: TensorKey

    def __post_init__(self) -> None:
        if not isinstance(self.key, TensorKey):
            raise ConfigError(f"FEED_TENSOR: key must be a TensorKey, got {self.key!r}")


@IONodeFactory.register(IONodeType.FEED_TENSOR, [None])
class FeedTensorNode(IONode):
    """Copies the staged tensor ``key`` to its own output of that name, on the device that computes."""

    input_defs: ClassVar[list[PinDef]] = list(TensorKey)  # bound to the staging area, never to an edge
    output_defs: ClassVar[list[PinDef]] = list(TensorKey)

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Raises PinError if nothing was fed under the key."""
        assert context.device is not None
        device = context.device.compute_device
        key = read_metadata(FeedSettings, context).key
        value = pins.get_tensor(key)
        if value is None:
            raise PinError(f"FEED_TENSOR: nothing is fed as {key.name} in run {pins.run}")
        data = value.data
        pins.put_tensor(key, [item.to(device) for item in data] if isinstance(data, list) else data.to(device))
