import pickle

import pytest

from kdit.errors import GraphError, PinTypeError, RegistryError
from kdit.keys import InferNodeType, IONodeType, ModelKey, PipelineKey, TensorKey
from kdit.nodes.core.pin_def import PinRef
from kdit.pipelines.pipeline_def import Edge
from kdit.pipelines.pipeline_def_builder import PipelineDefBuilder
from tests.executor.fakes import install_fakes


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fakes(monkeypatch)


def test_chained_connect_builds_nodes_and_edges_in_order() -> None:
    builder = PipelineDefBuilder(PipelineKey.FLUX1_T2I)
    load = builder.add_loader(ModelKey.FLUX1)
    encode = builder.add_infer(InferNodeType.TEXT_ENCODE)
    generate = builder.add_infer(InferNodeType.GENERATE, ModelKey.FLUX1)
    graph = builder.connect((load.FLUX1, generate.FLUX1)).connect((encode.POSITIVE, generate.POSITIVE)).build()
    assert graph.key is PipelineKey.FLUX1_T2I
    assert graph.nodes == (load.node_def, encode.node_def, generate.node_def)
    assert [str(edge) for edge in graph.edges] == [
        f"{load.node_id}.FLUX1 -> {generate.node_id}.FLUX1",
        f"{encode.node_id}.POSITIVE -> {generate.node_id}.POSITIVE",
    ]
    assert graph.node(encode.node_id) is encode.node_def
    assert graph.edges_into(generate.node_def) == graph.edges
    assert graph.edges_from(encode.node_def) == graph.edges[1:]
    with pytest.raises(GraphError, match=r"no node 0 in this graph; there are node \d+ \(LOAD_MODEL FLUX1\)"):
        graph.node(0)


@pytest.mark.parametrize("use_shift", [True, False])
def test_shift_is_the_same_as_connect_also_across_names(use_shift: bool) -> None:
    builder = PipelineDefBuilder()
    read, encode = builder.add_io(IONodeType.READ_IMAGE), builder.add_infer(InferNodeType.VAE_ENCODE_SPATIAL)
    if use_shift:
        read.IMAGE >> encode.START_IMG
    else:
        builder.connect((read.IMAGE, encode.START_IMG))
    edge = Edge(PinRef(read.node_id, TensorKey.IMAGE), PinRef(encode.node_id, TensorKey.START_IMG))
    assert builder.build().edges == (edge,)


def test_a_loader_serves_a_model_pin_of_another_name() -> None:
    builder = PipelineDefBuilder()
    load, decode = builder.add_loader(ModelKey.VAE_WAN2_1), builder.add_infer(InferNodeType.VAE_DECODE, ModelKey.VAE_KL)
    load.VAE_WAN2_1 >> decode.VAE_KL
    assert len(builder.build().edges) == 1


def test_the_graph_is_data() -> None:
    builder = PipelineDefBuilder()
    read, encode = builder.add_io(IONodeType.READ_IMAGE), builder.add_infer(InferNodeType.VAE_ENCODE_SPATIAL)
    read.IMAGE >> encode.END_IMG
    graph = builder.build()
    assert pickle.loads(pickle.dumps(graph)) == graph
    assert [end.connector for edge in graph.edges for end in (edge.src, edge.dst)] == [None, None]  # not the builder
    assert hash(graph) == hash(builder.build())


def test_two_pipelines_of_one_kind_share_no_node_id() -> None:
    graphs = []
    for _ in range(2):
        builder = PipelineDefBuilder(PipelineKey.FLUX1_T2I)
        builder.add_loader(ModelKey.FLUX1)
        builder.add_infer(InferNodeType.TEXT_ENCODE)
        graphs.append(builder.build())
    first, second = ({node_def.node_id for node_def in graph.nodes} for graph in graphs)
    assert len(first) == len(second) == 2
    assert not first & second


def test_tensor_and_model_pins_do_not_mix() -> None:
    builder = PipelineDefBuilder()
    read, decode = builder.add_io(IONodeType.READ_IMAGE), builder.add_infer(InferNodeType.VAE_DECODE, ModelKey.VAE_KL)
    with pytest.raises(PinTypeError, match="the tensor pin IMAGE to the model pin VAE_KL"):
        read.IMAGE >> decode.VAE_KL
    with pytest.raises(TypeError, match="the model pin VAE_KL to the tensor pin LATENTS"):
        builder.connect((builder.add_loader(ModelKey.VAE_KL).VAE_KL, decode.LATENTS))


def test_an_undeclared_output_is_refused() -> None:
    builder = PipelineDefBuilder()
    read, encode = builder.add_io(IONodeType.READ_IMAGE), builder.add_infer(InferNodeType.VAE_ENCODE_SPATIAL)
    read.VIDEO >> encode.START_IMG
    with pytest.raises(GraphError, match=r"\(READ_IMAGE\) declares no output VIDEO; declared: IMAGE"):
        builder.build()


def test_an_undeclared_input_is_refused() -> None:
    builder = PipelineDefBuilder()
    read, encode = builder.add_io(IONodeType.READ_IMAGE), builder.add_infer(InferNodeType.VAE_ENCODE_SPATIAL)
    read.IMAGE >> encode.LATENTS
    with pytest.raises(GraphError, match="declares no input LATENTS; declared: START_IMG, END_IMG"):
        builder.build()


def test_a_model_pin_that_the_node_does_not_have_is_refused() -> None:
    builder = PipelineDefBuilder()
    load, decode = builder.add_loader(ModelKey.VAE_KL), builder.add_infer(InferNodeType.VAE_DECODE)
    load.VAE_KL >> decode.VAE_KL
    with pytest.raises(GraphError, match="declares no input VAE_KL"):
        builder.build()


@pytest.mark.parametrize("connected", [(), (ModelKey.T5TextEncoder,)])
def test_a_dangling_model_pin_is_refused(connected: tuple[ModelKey, ...]) -> None:
    builder = PipelineDefBuilder()
    encode = builder.add_infer(InferNodeType.TEXT_ENCODE, ModelKey.T5TextEncoder, models=[ModelKey.CLIPTextEncoder])
    for key in connected:
        builder.connect((builder.add_loader(key).pin(key), encode.pin(key)))
    dangling = "CLIPTextEncoder" if connected else "T5TextEncoder"
    with pytest.raises(GraphError, match=f"has no edge into model pin {dangling}; connect a loader"):
        builder.build()


def test_dangling_tensor_pins_are_fine() -> None:
    builder = PipelineDefBuilder()
    builder.add_infer(InferNodeType.VAE_DECODE)
    assert builder.build().edges == ()


def test_a_second_edge_into_one_pin_is_refused() -> None:
    builder = PipelineDefBuilder()
    first, second = builder.add_io(IONodeType.READ_IMAGE), builder.add_io(IONodeType.READ_IMAGE)
    encode = builder.add_infer(InferNodeType.VAE_ENCODE_SPATIAL)
    first.IMAGE >> encode.START_IMG
    second.IMAGE >> encode.START_IMG
    message = rf"input START_IMG has two edges: {first.node_id}\.IMAGE -> .* and {second.node_id}\.IMAGE -> "
    with pytest.raises(GraphError, match=message):
        builder.build()


def test_a_node_of_another_builder_is_refused() -> None:
    builder = PipelineDefBuilder()
    stranger = PipelineDefBuilder().add_io(IONodeType.READ_IMAGE)
    encode = builder.add_infer(InferNodeType.VAE_ENCODE_SPATIAL)
    builder.connect((stranger.IMAGE, encode.START_IMG))
    with pytest.raises(GraphError, match=f"node {stranger.node_id} belongs to another builder"):
        builder.build()


def test_a_cycle_is_refused_and_its_nodes_are_named() -> None:
    builder = PipelineDefBuilder()
    read = builder.add_io(IONodeType.READ_IMAGE)
    first, second = (builder.add_infer(InferNodeType.VAE_ENCODE_SPATIAL) for _ in range(2))
    read.IMAGE >> first.START_IMG
    first.BASE_LATENT >> second.START_IMG
    second.BASE_LATENT >> first.END_IMG
    with pytest.raises(GraphError, match="cycle") as caught:
        builder.build()
    named = str(caught.value).partition(": ")[2].split(" -> ")
    assert named in (
        [str(first.node_def), str(second.node_def), str(first.node_def)],
        [str(second.node_def), str(first.node_def), str(second.node_def)],
    )


def test_a_node_that_feeds_itself_is_a_cycle() -> None:
    builder = PipelineDefBuilder()
    encode = builder.add_infer(InferNodeType.VAE_ENCODE_SPATIAL)
    encode.BASE_LATENT >> encode.START_IMG
    with pytest.raises(GraphError, match="cycle"):
        builder.build()


def test_an_unregistered_node_is_refused() -> None:
    builder = PipelineDefBuilder()
    builder.add_infer(InferNodeType.VACE_PREPROCESS)
    with pytest.raises(RegistryError, match="VACE_PREPROCESS"):
        builder.build()


def test_a_feed_node_takes_no_edge_and_brings_one_tensor() -> None:
    builder = PipelineDefBuilder()
    read, feed = builder.add_io(IONodeType.READ_IMAGE), builder.add_io(IONodeType.FEED_TENSOR)
    decode = builder.add_infer(InferNodeType.VAE_DECODE)
    feed.LATENTS >> decode.LATENTS
    assert len(builder.build().edges) == 1
    feed.NOISE >> decode.AUX_LATENT
    with pytest.raises(GraphError, match="its edges carry LATENTS, NOISE; use one node per tensor"):
        builder.build()
    read.IMAGE >> feed.IMAGE
    with pytest.raises(GraphError, match="takes its tensor from the caller"):
        builder.build()
