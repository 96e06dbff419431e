"""PipelineDef: a graph as pure data. Made by PipelineDefBuilder, walked by Pipeline, sent to other ranks."""

from __future__ import annotations

from dataclasses import dataclass

from kdit.errors import GraphError
from kdit.keys import InferNodeType, PipelineKey, TensorKey
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.core.pin_def import PinRef


@dataclass(frozen=True)
class Edge:
    """Output ``src`` of one node feeds input ``dst`` of another."""

    src: PinRef
    dst: PinRef

    def __str__(self) -> str:
        return f"{self.src} -> {self.dst}"


@dataclass(frozen=True)
class PipelineDef:
    """Nodes in the order of declaration, and the edges between their pins."""

    key: PipelineKey | None
    nodes: tuple[NodeDef, ...]
    edges: tuple[Edge, ...]

    def node(self, node_id: int) -> NodeDef:
        """The node with this id; raises GraphError if the graph has none."""
        for node_def in self.nodes:
            if node_def.node_id == node_id:
                return node_def
        raise GraphError(f"no node {node_id} in this graph; there are {', '.join(map(str, self.nodes)) or 'none'}")

    def makes_result(self, ref: PinRef) -> bool:
        """Whether the output ``ref`` is decoded pixels."""
        results = (InferNodeType.VAE_DECODE, InferNodeType.COMPOSITE)
        return isinstance(ref.pin, TensorKey) and any(
            n.node_id == ref.node_id and n.node_type in results for n in self.nodes
        )

    def edges_into(self, node_def: NodeDef) -> tuple[Edge, ...]:
        """Edges that bring inputs to ``node_def``."""
        return tuple(edge for edge in self.edges if edge.dst.node_id == node_def.node_id)

    def edges_from(self, node_def: NodeDef) -> tuple[Edge, ...]:
        """Edges that carry outputs of ``node_def``."""
        return tuple(edge for edge in self.edges if edge.src.node_id == node_def.node_id)
