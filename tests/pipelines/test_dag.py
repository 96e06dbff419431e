from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kdit.config import SampleConfig
from kdit.errors import GraphError, InputError
from kdit.keys import InferNodeType, IONodeType, ModelKey, RunId, TensorKey
from kdit.models.model_pool_key import ModelPoolKey
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.node_def import NodeDef, NodeRef
from kdit.nodes.core.pin_def import OutputPins
from kdit.pipelines.dag import apply_feeds, compute_input_pins, count_consumers, fed_key, prune, topo_sort
from kdit.pipelines.pipeline_def import PipelineDef
from kdit.pipelines.pipeline_def_builder import PipelineDefBuilder
from kdit.tensor.tensor_pool_key import STAGING_NODE_ID, TensorPoolKey
from tests.executor.fakes import install_fakes, make_pair


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fakes(monkeypatch)


@dataclass
class TextToImage:
    """Declared back to front, so that sorting has something to do."""

    graph: PipelineDef
    fetch: NodeRef
    decode: NodeRef
    generate: NodeRef
    encode: NodeRef
    load_network: NodeRef
    load_text: NodeRef


def text_to_image() -> TextToImage:
    builder = PipelineDefBuilder()
    fetch = builder.add_io(IONodeType.FETCH_TENSOR)
    decode = builder.add_infer(InferNodeType.VAE_DECODE)
    generate = builder.add_infer(InferNodeType.GENERATE, ModelKey.FLUX1)
    encode = builder.add_infer(InferNodeType.TEXT_ENCODE, ModelKey.T5TextEncoder)
    load_network = builder.add_loader(ModelKey.FLUX1)
    load_text = builder.add_loader(ModelKey.T5TextEncoder)
    load_network.FLUX1 >> generate.FLUX1
    load_text.T5TextEncoder >> encode.T5TextEncoder
    encode.POSITIVE >> generate.POSITIVE
    encode.NEGATIVE >> generate.NEGATIVE
    generate.LATENTS >> decode.LATENTS
    generate.LATENTS >> fetch.LATENTS
    decode.IMAGE >> fetch.IMAGE
    return TextToImage(builder.build(), fetch, decode, generate, encode, load_network, load_text)


def ids(nodes: tuple[NodeDef, ...]) -> list[int]:
    return [node_def.node_id for node_def in nodes]


def test_order_follows_the_edges() -> None:
    t2i = text_to_image()
    order = ids(topo_sort(t2i.graph))
    assert sorted(order) == sorted(ids(t2i.graph.nodes))
    for edge in t2i.graph.edges:
        assert order.index(edge.src.node_id) < order.index(edge.dst.node_id)


def test_order_is_that_of_declaration_where_edges_leave_it_open() -> None:
    builder = PipelineDefBuilder()
    reads = [builder.add_io(IONodeType.READ_IMAGE) for _ in range(4)]
    encode = builder.add_infer(InferNodeType.VAE_ENCODE_SPATIAL)
    last = builder.add_io(IONodeType.READ_IMAGE)
    last.IMAGE >> encode.START_IMG
    assert ids(topo_sort(builder.build())) == [*(ref.node_id for ref in reads), last.node_id, encode.node_id]


def test_input_pins_leave_out_what_was_not_written() -> None:
    t2i = text_to_image()
    positive = TensorPoolKey(t2i.encode.node_id, TensorKey.POSITIVE)
    network = ModelPoolKey(t2i.load_network.node_id, ModelKey.FLUX1)
    outputs: dict[int, OutputPins] = {t2i.encode.node_id: {TensorKey.POSITIVE: positive}}
    pins = compute_input_pins(t2i.generate.node_def, t2i.graph.edges, outputs)
    assert pins == {TensorKey.POSITIVE: positive, ModelKey.FLUX1: network}
    # decode did not run at all
    assert compute_input_pins(t2i.fetch.node_def, t2i.graph.edges, outputs) == {}


def test_input_pins_translate_names_across_pins() -> None:
    builder = PipelineDefBuilder()
    read, encode = builder.add_io(IONodeType.READ_IMAGE), builder.add_infer(InferNodeType.VAE_ENCODE_SPATIAL)
    read.IMAGE >> encode.END_IMG
    image = TensorPoolKey(read.node_id, TensorKey.IMAGE)
    pins = compute_input_pins(encode.node_def, builder.build().edges, {read.node_id: {TensorKey.IMAGE: image}})
    assert pins == {TensorKey.END_IMG: image}


def test_consumers_are_counted_per_edge_of_active_nodes() -> None:
    t2i = text_to_image()
    encoded = {TensorPoolKey(t2i.encode.node_id, key): 1 for key in (TensorKey.POSITIVE, TensorKey.NEGATIVE)}
    latents = TensorPoolKey(t2i.generate.node_id, TensorKey.LATENTS)
    image = TensorPoolKey(t2i.decode.node_id, TensorKey.IMAGE)
    assert count_consumers(t2i.graph, t2i.graph.nodes) == {**encoded, latents: 2, image: 1}
    without_decode = [n for n in t2i.graph.nodes if n != t2i.decode.node_def]
    assert count_consumers(t2i.graph, without_decode) == {**encoded, latents: 1}
    without_fetch = [n for n in t2i.graph.nodes if n != t2i.fetch.node_def]
    assert count_consumers(t2i.graph, without_fetch) == {**encoded, latents: 1, image: 0}


def test_held_tensors_are_not_counted() -> None:
    t2i = text_to_image()
    counts = count_consumers(t2i.graph, t2i.graph.nodes, held=[TensorKey.POSITIVE, TensorKey.IMAGE])
    assert {key.pin for key in counts} == {TensorKey.NEGATIVE, TensorKey.LATENTS}


def test_an_output_that_a_feed_has_replaced_is_not_held() -> None:
    t2i = text_to_image()
    graph = apply_feeds(t2i.graph, frozenset({TensorKey.POSITIVE}))
    counts = count_consumers(graph, graph.nodes, held=[TensorKey.POSITIVE])
    assert counts[TensorPoolKey(t2i.encode.node_id, TensorKey.POSITIVE)] == 0
    assert TensorPoolKey(graph.nodes[0].node_id, TensorKey.POSITIVE) not in counts


def test_a_feed_replaces_the_producer_and_pruning_drops_it_with_its_loader() -> None:
    t2i = text_to_image()
    keys = (TensorKey.POSITIVE, TensorKey.NEGATIVE)
    graph = apply_feeds(t2i.graph, frozenset(keys))
    assert [e.src.node_id for e in graph.edges_from(t2i.encode.node_def)] == []
    feeds = [n for n in graph.nodes if n.node_type is IONodeType.FEED_TENSOR]
    assert {fed_key(feed, graph.edges) for feed in feeds} == set(keys)
    for feed in feeds:
        key = fed_key(feed, graph.edges)
        assert compute_input_pins(feed, graph.edges, {}) == {key: TensorPoolKey(STAGING_NODE_ID, key)}
    kept = prune(graph, [t2i.fetch.node_def])
    gone = set(graph.nodes) - set(kept.nodes)
    assert gone == {t2i.encode.node_def, t2i.load_text.node_def}
    assert {e.dst.node_id for e in kept.edges} == set(ids(kept.nodes)) - {*ids(tuple(feeds)), t2i.load_network.node_id}


def test_one_fed_key_of_two_keeps_the_producer_of_the_other() -> None:
    t2i = text_to_image()
    graph = prune(apply_feeds(t2i.graph, frozenset({TensorKey.NEGATIVE})), [t2i.fetch.node_def])
    assert t2i.encode.node_def in graph.nodes
    assert [e.src.pin for e in graph.edges_from(t2i.encode.node_def)] == [TensorKey.POSITIVE]


def test_a_fed_tensor_reaches_every_reader_of_the_producer() -> None:
    t2i = text_to_image()
    graph = apply_feeds(t2i.graph, frozenset({TensorKey.LATENTS}))
    feed = graph.nodes[0]
    assert {e.dst.node_id for e in graph.edges_from(feed)} == {t2i.decode.node_id, t2i.fetch.node_id}
    assert set(prune(graph, [t2i.fetch.node_def]).nodes) == {feed, t2i.decode.node_def, t2i.fetch.node_def}


def test_an_open_input_gets_its_feed_and_bridges_do_not() -> None:
    t2i = text_to_image()
    graph = apply_feeds(t2i.graph, frozenset({TensorKey.NOISE}))
    added = set(graph.edges) - set(t2i.graph.edges)
    assert [(e.dst.node_id, e.dst.pin) for e in added] == [(t2i.generate.node_id, TensorKey.NOISE)]


def test_a_feed_named_after_an_input_replaces_only_that_input() -> None:
    builder = PipelineDefBuilder()
    read, encode = builder.add_io(IONodeType.READ_IMAGE), builder.add_infer(InferNodeType.VAE_ENCODE_SPATIAL)
    read.IMAGE >> encode.START_IMG
    read.IMAGE >> encode.END_IMG
    graph = apply_feeds(builder.build(), frozenset({TensorKey.START_IMG}))
    sources = {e.dst.pin: e.src.node_id for e in graph.edges_into(encode.node_def)}
    assert sources == {TensorKey.START_IMG: graph.nodes[0].node_id, TensorKey.END_IMG: read.node_id}


def test_a_feed_named_after_an_output_replaces_it_under_other_names_too() -> None:
    builder = PipelineDefBuilder()
    read, encode = builder.add_io(IONodeType.READ_IMAGE), builder.add_infer(InferNodeType.VAE_ENCODE_SPATIAL)
    read.IMAGE >> encode.END_IMG
    graph = apply_feeds(builder.build(), frozenset({TensorKey.IMAGE}))
    (edge,) = graph.edges
    assert (edge.src.node_id, edge.src.pin, edge.dst.pin) == (
        graph.nodes[0].node_id,
        TensorKey.IMAGE,
        TensorKey.END_IMG,
    )


def test_a_key_that_nothing_reads_is_refused_with_the_keys_that_work() -> None:
    with pytest.raises(
        InputError, match="nothing in this pipeline reads VIDEO; it takes POSITIVE, NEGATIVE, AUX_LATENT"
    ):
        apply_feeds(text_to_image().graph, frozenset({TensorKey.VIDEO}))


def test_pruning_to_no_sink_leaves_nothing() -> None:
    t2i = text_to_image()
    assert prune(t2i.graph, []) == PipelineDef(None, (), ())
    assert ids(prune(t2i.graph, [t2i.load_text.node_def]).nodes) == [t2i.load_text.node_id]


def test_a_feed_node_without_edges_has_no_key() -> None:
    with pytest.raises(GraphError, match="its edges carry none"):
        fed_key(NodeDef(IONodeType.FEED_TENSOR), ())


@pytest.mark.parametrize("fed", [False, True])
def test_a_walk_over_the_graph_frees_everything_but_the_result(fed: bool) -> None:
    """The whole graph on two ranks, as Pipeline walks it."""
    t2i, pair, run = text_to_image(), make_pair(), RunId("r")
    keys = frozenset({TensorKey.NOISE, TensorKey.POSITIVE, TensorKey.NEGATIVE} if fed else {TensorKey.NOISE})
    graph = prune(apply_feeds(t2i.graph, keys), [t2i.fetch.node_def])
    log: list[tuple[str, int]] = []
    outputs: dict[int, OutputPins] = {}
    for key, count in count_consumers(graph, graph.nodes).items():
        pair.engine.register_tensor(key, count, run=run)
    pair.engine.feed_tensors({key: torch.full((1,), 4.0) for key in keys}, run=run)
    for node_def in topo_sort(graph):
        metadata: dict[str, object] = {"log": log}
        if node_def.node_type is IONodeType.FEED_TENSOR:
            metadata = {"key": fed_key(node_def, graph.edges)}
        elif node_def.node_type is IONodeType.FETCH_TENSOR:
            metadata = {}
        context = NodeContext(sample_config=SampleConfig(steps=2), metadata=metadata)
        pins = compute_input_pins(node_def, graph.edges, outputs)
        outputs[node_def.node_id] = pair.engine.run_node(node_def, pins, context, run=run)
    image = pair.engine.get_tensor(TensorPoolKey(t2i.fetch.node_id, TensorKey.IMAGE), run=run)
    assert isinstance(image, Tensor)
    assert image.item() == (4 + 2) * 10
    kept = [(run, TensorPoolKey(t2i.fetch.node_id, key)) for key in (TensorKey.LATENTS, TensorKey.IMAGE)]
    assert [executor.tensor_keys() for executor in pair.ranks] == [tuple(kept), ()]
    assert [rank for name, rank in log if name == "encode"] == ([] if fed else [0])
    assert [rank for name, rank in log if name == "load"] == ([0, 1] if fed else [0, 1, 0, 1])
    pair.engine.end_run(run)
    assert pair.engine.tensor_keys() == ()
    assert pair.tape == []
