"""FETCH_TENSOR: the end of a graph, whose outputs are held for the caller until the run ends."""

from __future__ import annotations

from typing import ClassVar

from kdit.errors import ConfigError
from kdit.keys import IONodeType, TensorKey
from kdit.nodes.core.factory import IONodeFactory
from kdit.nodes.core.node import IONode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.core.pin_hub import PinHub


@IONodeFactory.register(IONodeType.FETCH_TENSOR, [None])
class FetchTensorNode(IONode):
    """Copies each connected input to the output of the same name."""

    input_defs: ClassVar[list[PinDef]] = list(TensorKey)
    output_defs: ClassVar[list[PinDef]] = list(TensorKey)

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Reads no settings; raises ConfigError if there are any."""
        if context.metadata:
            raise ConfigError(f"FETCH_TENSOR takes no metadata, got {', '.join(map(repr, context.metadata))}")
        for key in TensorKey:
            value = pins.get_tensor(key)
            if value is not None:
                pins.put_tensor(key, value.data)
