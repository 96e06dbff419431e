"""Functions on graphs: order, input pins, reference counts, feeds, pruning. Called by builder and Pipeline."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from kdit.errors import GraphError, InputError
from kdit.keys import IONodeType, TensorKey
from kdit.nodes.core.factory import declared_inputs, declared_outputs
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.core.pin_def import InputPins, OutputPins, PinRef, pool_key
from kdit.pipelines.pipeline_def import Edge, PipelineDef
from kdit.tensor.tensor_pool_key import STAGING_NODE_ID, TensorPoolKey

_BRIDGES = frozenset({IONodeType.FEED_TENSOR, IONodeType.FETCH_TENSOR})  # declare every TensorKey, mean none


def topo_sort(pipeline_def: PipelineDef) -> tuple[NodeDef, ...]:
    """Every node after the nodes that it reads from, else in the order of declaration.

    Raises GraphError naming the nodes of a cycle.
    """
    sources: dict[int, set[int]] = {node_def.node_id: set() for node_def in pipeline_def.nodes}
    for edge in pipeline_def.edges:
        sources[edge.dst.node_id].add(edge.src.node_id)
    waiting = list(pipeline_def.nodes)
    done: set[int] = set()
    ordered: list[NodeDef] = []
    while waiting:
        ready = next((node_def for node_def in waiting if sources[node_def.node_id] <= done), None)
        if ready is None:
            raise GraphError(f"the graph has a cycle: {_describe_cycle(pipeline_def, sources, done)}")
        waiting.remove(ready)
        done.add(ready.node_id)
        ordered.append(ready)
    return tuple(ordered)


def _describe_cycle(pipeline_def: PipelineDef, sources: Mapping[int, set[int]], done: set[int]) -> str:
    """One cycle among the nodes that are not ``done``: each of these has a source that is not done either."""
    path = [next(node_def.node_id for node_def in pipeline_def.nodes if node_def.node_id not in done)]
    while path[-1] not in path[:-1]:
        path.append(min(sources[path[-1]] - done))
    cycle = path[path.index(path[-1]) :]
    return " -> ".join(str(pipeline_def.node(node_id)) for node_id in reversed(cycle))


def fed_key(node_def: NodeDef, edges: Sequence[Edge]) -> TensorKey:
    """The key that a FEED_TENSOR node brings in: the one pin on its outgoing edges."""
    assert node_def.node_type is IONodeType.FEED_TENSOR, node_def
    pins = {edge.src.pin for edge in edges if edge.src.node_id == node_def.node_id}
    if len(pins) != 1:
        names = ", ".join(sorted(pin.name for pin in pins)) or "none"
        raise GraphError(f"{node_def} brings in one tensor, but its edges carry {names}; use one node per tensor")
    (pin,) = pins
    assert isinstance(pin, TensorKey)
    return pin


def compute_input_pins(node_def: NodeDef, edges: Sequence[Edge], all_outputs: Mapping[int, OutputPins]) -> InputPins:
    """Where each connected input of ``node_def`` is found.

    ``all_outputs`` holds what the nodes of this run have written, by node id. A tensor that was not
    written (an optional output, a node whose condition was false) is left out: the node gets None. Models
    are always bound, since a loader need not belong to this run.
    """
    if node_def.node_type is IONodeType.FEED_TENSOR:
        key = fed_key(node_def, edges)
        return {key: TensorPoolKey(STAGING_NODE_ID, key)}
    pins: InputPins = {}
    for edge in edges:
        if edge.dst.node_id != node_def.node_id:
            continue
        written = all_outputs.get(edge.src.node_id, {})
        if edge.src.pin in written or not isinstance(edge.src.pin, TensorKey):
            pins[edge.dst.pin] = pool_key(edge.src.node_id, edge.src.pin)
    return pins


def count_consumers(
    pipeline_def: PipelineDef, active_nodes: Collection[NodeDef], *, held: Collection[TensorKey] = ()
) -> dict[TensorPoolKey, int]:
    """How many times each tensor output of ``active_nodes`` will be read by ``active_nodes``.

    0 means that it is freed as soon as it is written. Outputs of FETCH_TENSOR nodes, and those named in
    ``held`` (of several, those that are read), are left out: nobody counts them, so they stay until the
    run ends.
    """
    active = {node_def.node_id for node_def in active_nodes}
    counts: dict[TensorPoolKey, int] = {}
    for node_def in active_nodes:
        if node_def.node_type not in _BRIDGES:
            outputs = (pin for pin in declared_outputs(node_def) if isinstance(pin, TensorKey))
            counts.update({TensorPoolKey(node_def.node_id, pin): 0 for pin in outputs})
    for edge in pipeline_def.edges:
        if isinstance(edge.src.pin, TensorKey) and edge.src.node_id in active and edge.dst.node_id in active:
            key = TensorPoolKey(edge.src.node_id, edge.src.pin)
            counts[key] = counts.get(key, 0) + 1
    fetched = {node_def.node_id for node_def in active_nodes if node_def.node_type is IONodeType.FETCH_TENSOR}
    read = {key.pin for key, count in counts.items() if count}
    kept = {key for key, count in counts.items() if key.pin in held and (count or key.pin not in read)}
    return {key: count for key, count in counts.items() if key not in kept and key.node_id not in fetched}


def apply_feeds(pipeline_def: PipelineDef, keys: frozenset[TensorKey]) -> PipelineDef:
    """The graph with one FEED_TENSOR node per key in place of what produced that tensor.

    A key means the inputs of that name, together with the other edges of what they were connected to under
    that name; without such inputs, the outputs of that name. If neither is connected, every node that
    declares the input gets an edge. Raises InputError for a key that nothing reads. Producers stay in the
    graph: ``prune`` drops those that nobody needs any more.
    """
    nodes = list(pipeline_def.nodes)
    edges = list(pipeline_def.edges)
    for key in sorted(keys, key=list(TensorKey).index):
        feed = NodeDef(IONodeType.FEED_TENSOR)
        source = PinRef(feed.node_id, key)
        producers = {edge.src for edge in edges if edge.dst.pin is key}
        producers = producers or {edge.src for edge in edges if edge.src.pin is key}
        declared = {node_def.node_id for node_def in pipeline_def.nodes}
        made = [src for src in producers if src.node_id in declared and pipeline_def.makes_result(src)]
        if made:
            raise InputError(f"feeds: {key.name} is what this pipeline makes ({made[0]}); LATENTS can be fed instead")
        if producers:
            edges = [
                replace(edge, src=source) if edge.src in producers and key in (edge.src.pin, edge.dst.pin) else edge
                for edge in edges
            ]
        else:
            readers = [node_def for node_def in pipeline_def.nodes if key in _tensor_inputs(node_def)]
            if not readers:
                raise InputError(
                    f"feeds: nothing in this pipeline reads {key.name}; it takes {_feedable(pipeline_def)}"
                )
            edges += [Edge(source, PinRef(node_def.node_id, key)) for node_def in readers]
        nodes.insert(0, feed)
    return PipelineDef(pipeline_def.key, tuple(nodes), tuple(edges))


def prune(pipeline_def: PipelineDef, sinks: Collection[NodeDef]) -> PipelineDef:
    """The graph without the nodes that no node in ``sinks`` needs."""
    needed = {node_def.node_id for node_def in sinks}
    frontier = list(needed)
    while frontier:
        node_id = frontier.pop()
        for edge in pipeline_def.edges:
            if edge.dst.node_id == node_id and edge.src.node_id not in needed:
                needed.add(edge.src.node_id)
                frontier.append(edge.src.node_id)
    return PipelineDef(
        pipeline_def.key,
        tuple(node_def for node_def in pipeline_def.nodes if node_def.node_id in needed),
        tuple(edge for edge in pipeline_def.edges if edge.dst.node_id in needed),
    )


def _tensor_inputs(node_def: NodeDef) -> tuple[TensorKey, ...]:
    if node_def.node_type in _BRIDGES:
        return ()
    return tuple(pin for pin in declared_inputs(node_def) if isinstance(pin, TensorKey))


def _feedable(pipeline_def: PipelineDef) -> str:
    keys = {pin for edge in pipeline_def.edges for pin in (edge.src.pin, edge.dst.pin)}
    keys.update(key for node_def in pipeline_def.nodes for key in _tensor_inputs(node_def))
    return ", ".join(key.name for key in TensorKey if key in keys) or "none"
