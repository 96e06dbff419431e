"""PipelineDefBuilder: declares nodes and edges, checks them, gives a PipelineDef. Called by pipelines/defs."""

from __future__ import annotations

from collections.abc import Sequence

from kdit.errors import GraphError, PinTypeError
from kdit.keys import InferNodeType, IONodeType, ModelKey, PipelineKey, TensorKey
from kdit.nodes.core.factory import declared_inputs, declared_outputs, model_inputs, node_class
from kdit.nodes.core.node_def import NodeDef, NodeRef
from kdit.nodes.core.pin_def import PinDef, PinRef
from kdit.pipelines.dag import fed_key, topo_sort
from kdit.pipelines.pipeline_def import Edge, PipelineDef


class PipelineDefBuilder:
    """Collects nodes and edges; ``build`` checks the whole graph.

    ``connect`` and ``>>`` between pins are the same call. A tensor pin may be connected to a tensor pin of
    another name, a model pin to a model pin of another name.
    """

    def __init__(self, key: PipelineKey | None = None) -> None:
        self._key = key
        self._nodes: list[NodeDef] = []
        self._edges: list[Edge] = []

    def add_loader(self, model_key: ModelKey) -> NodeRef:
        """A LOAD_MODEL node, whose one output is ``model_key``."""
        return self.add_io(IONodeType.LOAD_MODEL, model_key)

    def add_io(self, node_type: IONodeType, model_key: ModelKey | None = None) -> NodeRef:
        """A node that loads, reads, writes or bridges."""
        return self._add(NodeDef(node_type, model_key))

    def add_infer(
        self, node_type: InferNodeType, model_key: ModelKey | None = None, models: Sequence[ModelKey] = ()
    ) -> NodeRef:
        """A node that computes with ``model_key`` and the further ``models``, each to be connected."""
        return self._add(NodeDef(node_type, model_key, tuple(models)))

    def connect(self, *pairs: tuple[PinRef, PinRef]) -> PipelineDefBuilder:
        """Add an edge per (output, input) pair; raises PinTypeError if one is a tensor and one a model."""
        for src, dst in pairs:
            self._connect_one(src, dst)
        return self

    def build(self) -> PipelineDef:
        """The graph. Raises GraphError for what could not run, RegistryError for a node that does not exist."""
        pipeline_def = PipelineDef(self._key, tuple(self._nodes), tuple(self._edges))
        for node_def in pipeline_def.nodes:
            node_class(node_def)  # RegistryError now rather than when its turn comes
        _check_edges(pipeline_def)
        _check_model_pins(pipeline_def)
        topo_sort(pipeline_def)
        for node_def in pipeline_def.nodes:
            if node_def.node_type is IONodeType.FEED_TENSOR:
                fed_key(node_def, pipeline_def.edges)
        return pipeline_def

    def _add(self, node_def: NodeDef) -> NodeRef:
        self._nodes.append(node_def)
        return NodeRef(node_def, self._connect_one)

    def _connect_one(self, src: PinRef, dst: PinRef) -> None:
        if isinstance(src.pin, TensorKey) != isinstance(dst.pin, TensorKey):
            raise PinTypeError(f"{src} -> {dst}: cannot connect {_kind(src.pin)} to {_kind(dst.pin)}")
        # without their connectors the edges are data: they compare, pickle, and outlive the builder
        self._edges.append(Edge(PinRef(src.node_id, src.pin), PinRef(dst.node_id, dst.pin)))


def _kind(pin: PinDef) -> str:
    return f"the {'tensor' if isinstance(pin, TensorKey) else 'model'} pin {pin.name}"


def _check_edges(pipeline_def: PipelineDef) -> None:
    """Both ends exist and are declared; no input has two edges; fed tensors come from the caller alone."""
    known = {node_def.node_id: node_def for node_def in pipeline_def.nodes}
    taken: dict[PinRef, Edge] = {}
    for edge in pipeline_def.edges:
        for end in (edge.src, edge.dst):
            if end.node_id not in known:
                raise GraphError(f"edge {edge}: node {end.node_id} belongs to another builder")
        source, target = known[edge.src.node_id], known[edge.dst.node_id]
        _check_declared(edge, source, edge.src.pin, declared_outputs(source), "output")
        _check_declared(edge, target, edge.dst.pin, declared_inputs(target), "input")
        if target.node_type is IONodeType.FEED_TENSOR:
            raise GraphError(f"edge {edge}: {target} takes its tensor from the caller, not from an edge")
        if edge.dst in taken:
            raise GraphError(f"{target}: input {edge.dst.pin.name} has two edges: {taken[edge.dst]} and {edge}")
        taken[edge.dst] = edge


def _check_declared(edge: Edge, node_def: NodeDef, pin: PinDef, declared: Sequence[PinDef], what: str) -> None:
    if pin not in declared:
        names = ", ".join(item.name for item in declared) or "none"
        raise GraphError(f"edge {edge}: {node_def} declares no {what} {pin.name}; declared: {names}")


def _check_model_pins(pipeline_def: PipelineDef) -> None:
    """A tensor pin may stay open, a model pin may not."""
    for node_def in pipeline_def.nodes:
        connected = {edge.dst.pin for edge in pipeline_def.edges_into(node_def)}
        for key in model_inputs(node_def):
            if key not in connected:
                raise GraphError(f"{node_def} has no edge into model pin {key.name}; connect a loader")
