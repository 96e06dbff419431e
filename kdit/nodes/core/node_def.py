"""NodeDef: one node of a graph as pure data, and NodeRef, by which a builder's user names its pins."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from kdit.errors import GraphError
from kdit.keys import InferNodeType, IONodeType, ModelKey, TensorKey
from kdit.nodes.core.pin_def import PinDef, PinRef

_node_ids = itertools.count(1)  # 0 is the staging area of fed tensors


@dataclass(frozen=True)
class NodeDef:
    """A node's type and models. ``node_id`` is unique in the process that builds graphs.

    ``models`` are required model pins besides ``model_key``: a second text encoder, a second expert.
    """

    node_type: InferNodeType | IONodeType
    model_key: ModelKey | None = None
    models: tuple[ModelKey, ...] = ()
    node_id: int = field(init=False, default_factory=_node_ids.__next__)

    def __post_init__(self) -> None:
        pins = (self.model_key, *self.models)
        if len(set(pins)) != len(pins):
            raise GraphError(f"{self}: each model may be named once, got {self.model_key} and {self.models}")

    @property
    def is_io(self) -> bool:
        """Whether this is an IONode: it loads, reads, writes or bridges to the caller."""
        return isinstance(self.node_type, IONodeType)

    def __str__(self) -> str:
        model = f" {self.model_key.name}" if self.model_key else ""
        return f"node {self.node_id} ({self.node_type.name}{model})"


class NodeRef:
    """A node in a builder. ``ref.LATENTS`` is the PinRef of the TensorKey or ModelKey of that name."""

    __slots__ = ("_connector", "node_def")

    def __init__(self, node_def: NodeDef, connector: Callable[[PinRef, PinRef], None] | None = None) -> None:
        self.node_def = node_def
        self._connector = connector

    @property
    def node_id(self) -> int:
        """The id of the node."""
        return self.node_def.node_id

    def pin(self, pin: PinDef) -> PinRef:
        """The node's pin by its key."""
        return PinRef(self.node_def.node_id, pin, self._connector)

    def __getattr__(self, name: str) -> PinRef:
        for keys in (TensorKey.__members__, ModelKey.__members__):
            if name in keys:
                return self.pin(keys[name])
        known = [*TensorKey.__members__, *ModelKey.__members__]
        near = difflib.get_close_matches(name.upper(), known, cutoff=0.5) or known
        raise AttributeError(f"no TensorKey or ModelKey is named {name!r}; near: {', '.join(near)}")

    def __repr__(self) -> str:
        return f"<NodeRef {self.node_def}>"
