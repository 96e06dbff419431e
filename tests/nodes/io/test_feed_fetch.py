import pytest
import torch
from torch import Tensor

from kdit.engine.engine import Engine
from kdit.errors import ConfigError, PinError
from kdit.keys import IONodeType, RunId, TensorKey
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.core.pin_def import InputPins
from kdit.tensor.tensor_pool_key import STAGING_NODE_ID, TensorPoolKey

RUN = RunId("r")
STAGED: InputPins = {TensorKey.POSITIVE: TensorPoolKey(STAGING_NODE_ID, TensorKey.POSITIVE)}


@pytest.fixture
def engine() -> Engine:
    return Engine.single("cpu")


def feed_context(key: object) -> NodeContext:
    return NodeContext(metadata={"key": key})


@pytest.mark.parametrize("as_list", [True, False])
def test_feed_takes_the_staged_tensor_to_its_own_output(engine: Engine, as_list: bool) -> None:
    data: Tensor | list[Tensor] = [torch.ones(2), torch.zeros(1)] if as_list else torch.ones(2)
    node_def = NodeDef(IONodeType.FEED_TENSOR)
    engine.feed_tensors({TensorKey.POSITIVE: data, TensorKey.NOISE: torch.ones(1)}, run=RUN)
    out = engine.run_node(node_def, STAGED, feed_context(TensorKey.POSITIVE), run=RUN)
    own = TensorPoolKey(node_def.node_id, TensorKey.POSITIVE)
    assert out == {TensorKey.POSITIVE: own}
    # the staging area has handed over this key and keeps the other
    assert engine.tensor_keys() == ((RUN, TensorPoolKey(STAGING_NODE_ID, TensorKey.NOISE)), (RUN, own))
    got = engine.get_tensor(own, run=RUN)
    assert isinstance(got, list) == as_list
    assert all(torch.equal(a, b) for a, b in zip(got, data, strict=True))


def test_feed_says_when_nothing_was_fed(engine: Engine) -> None:
    with pytest.raises(PinError, match=r"input POSITIVE, 0\.POSITIVE, is not on rank 0"):
        engine.run_node(NodeDef(IONodeType.FEED_TENSOR), STAGED, feed_context(TensorKey.POSITIVE), run=RUN)
    with pytest.raises(PinError, match="nothing is fed as NOISE in run r"):
        engine.run_node(NodeDef(IONodeType.FEED_TENSOR), {}, feed_context(TensorKey.NOISE), run=RUN)


def test_feed_wants_a_key(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="key must be a TensorKey, got 'positive'"):
        engine.run_node(NodeDef(IONodeType.FEED_TENSOR), {}, feed_context("positive"))
    with pytest.raises(ConfigError, match="missing metadata 'key'"):
        engine.run_node(NodeDef(IONodeType.FEED_TENSOR), {}, NodeContext())


def test_fetch_copies_connected_inputs_and_outlives_its_sources(engine: Engine) -> None:
    image, latents = TensorPoolKey(500, TensorKey.IMAGE), TensorPoolKey(501, TensorKey.BASE_LATENT)
    for key in (image, latents):
        engine.register_tensor(key, 1, run=RUN)
    engine.put_tensors({image: torch.ones(3), latents: [torch.zeros(2)]}, run=RUN)
    node_def = NodeDef(IONodeType.FETCH_TENSOR)
    pins: InputPins = {TensorKey.IMAGE: image, TensorKey.LATENTS: latents}
    out = engine.run_node(node_def, pins, NodeContext(), run=RUN)
    assert set(out) == {TensorKey.IMAGE, TensorKey.LATENTS}
    assert {key.node_id for _, key in engine.tensor_keys()} == {node_def.node_id}
    got = engine.get_tensor(TensorKey.IMAGE, run=RUN)
    assert isinstance(got, Tensor)
    assert torch.equal(got, torch.ones(3))
    fetched = engine.get_tensor(TensorKey.LATENTS, run=RUN)
    assert isinstance(fetched, list)
    assert torch.equal(fetched[0], torch.zeros(2))


def test_fetch_without_inputs_writes_nothing_and_reads_no_settings(engine: Engine) -> None:
    assert engine.run_node(NodeDef(IONodeType.FETCH_TENSOR), {}, NodeContext(), run=RUN) == {}
    with pytest.raises(ConfigError, match="takes no metadata, got 'key'"):
        engine.run_node(NodeDef(IONodeType.FETCH_TENSOR), {}, NodeContext(metadata={"key": 1}), run=RUN)
