"""One executor, and two that believe to be two ranks: who runs, where outputs are, how failures travel."""

import inspect

import pytest
import torch
from torch import Tensor

from kdit.config import ParallelConfig, SampleConfig
from kdit.engine.engine import Engine
from kdit.errors import ConfigError, PinError
from kdit.executor.executor import Executor
from kdit.keys import InferNodeType, IONodeType, ModelKey, RunId, TensorKey
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.core.pin_def import InputPins
from kdit.tensor.tensor_pool_key import TensorPoolKey
from tests.executor.fakes import Pair, install_fakes, make_pair

RUN = RunId("r")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    install_fakes(monkeypatch)
    return make_pair()


def keys_of(executor: Executor) -> list[TensorPoolKey]:
    return [key for run, key in executor.tensor_keys() if run == RUN]


def put_everywhere(pair: Pair, key: TensorPoolKey, consumers: int) -> None:
    pair.engine.register_tensor(key, consumers, run=RUN)
    pair.engine.put_tensors({key: torch.ones(1)}, run=RUN)


# -- the three policies


def test_r0_r0_bcast_runs_on_rank_0_and_reaches_all(pair: Pair) -> None:
    log: list[tuple[str, int]] = []
    node_def = NodeDef(InferNodeType.TEXT_ENCODE)
    context = NodeContext(negative_prompt="n", metadata={"log": log})
    out = pair.engine.run_node(node_def, {}, context, run=RUN)
    assert log == [("encode", 0)]
    expected = [TensorPoolKey(node_def.node_id, key) for key in (TensorKey.POSITIVE, TensorKey.NEGATIVE)]
    assert list(out.values()) == expected
    for executor in pair.ranks:
        assert keys_of(executor) == expected
        positive = executor.get_tensor(TensorKey.POSITIVE, run=RUN)
        assert isinstance(positive, list)
        assert [item.flatten().tolist() for item in positive] == [[3, 3], [1, 1]]
    assert pair.tape == []


def test_r0_r0_bcast_leaves_out_what_rank_0_did_not_write(pair: Pair) -> None:
    node_def = NodeDef(InferNodeType.TEXT_ENCODE)
    pair.engine.run_node(node_def, {}, NodeContext(), run=RUN)
    for executor in pair.ranks:
        assert [key.pin for key in keys_of(executor)] == [TensorKey.POSITIVE]


def test_r0_r0_bcast_needs_its_inputs_on_rank_0_only(pair: Pair) -> None:
    image = TensorPoolKey(500, TensorKey.IMAGE)

    pair.engine.register_tensor(image, 1, run=RUN)
    pair.ranks[0]._pool(RUN).put(image, torch.ones(1))
    node_def = NodeDef(InferNodeType.VAE_ENCODE_SPATIAL)
    pair.engine.run_node(node_def, {TensorKey.START_IMG: image}, NodeContext(), run=RUN)
    for executor in pair.ranks:
        assert keys_of(executor) == [TensorPoolKey(node_def.node_id, TensorKey.BASE_LATENT)]
        shape = executor.get_tensor(TensorKey.BASE_LATENT, run=RUN)
        assert isinstance(shape, Tensor)
        assert shape.tolist() == [True, False]


def test_all_r0_r0_runs_and_stays_on_rank_0_but_consumes_on_all(pair: Pair) -> None:
    log: list[tuple[str, int]] = []
    latents = TensorPoolKey(500, TensorKey.LATENTS)
    put_everywhere(pair, latents, 1)
    node_def = NodeDef(InferNodeType.VAE_DECODE)
    context = NodeContext(metadata={"log": log})
    out = pair.engine.run_node(node_def, {TensorKey.LATENTS: latents}, context, run=RUN)
    image = TensorPoolKey(node_def.node_id, TensorKey.IMAGE)
    assert log == [("decode", 0)]
    assert out == {TensorKey.IMAGE: image}
    assert keys_of(pair.ranks[0]) == [image]
    assert keys_of(pair.ranks[1]) == []
    got = pair.engine.get_tensor(TensorKey.IMAGE, run=RUN)
    assert isinstance(got, Tensor)
    assert got.item() == 10
    assert pair.tape == []


def test_what_rank_0_alone_holds_can_go_on_on_rank_0_but_not_on_all(pair: Pair) -> None:
    image = TensorPoolKey(500, TensorKey.IMAGE)
    pair.engine.register_tensor(image, 2, run=RUN)
    pair.ranks[0]._pool(RUN).put(image, torch.ones(1))
    fetch = NodeDef(IONodeType.FETCH_TENSOR)
    assert set(pair.engine.run_node(fetch, {TensorKey.IMAGE: image}, NodeContext(), run=RUN)) == {TensorKey.IMAGE}
    load = NodeDef(IONodeType.LOAD_MODEL, ModelKey.FLUX1)
    pins: InputPins = {**pair.engine.run_node(load, {}, NodeContext()), TensorKey.NOISE: image}
    context = NodeContext(sample_config=SampleConfig(steps=1))
    with pytest.raises(PinError, match=r"input NOISE, 500\.IMAGE, is not on rank 1 in run r"):
        pair.engine.run_node(NodeDef(InferNodeType.GENERATE, ModelKey.FLUX1), pins, context, run=RUN)


def test_all_all_all_runs_everywhere(pair: Pair) -> None:
    log: list[tuple[str, int]] = []
    load = NodeDef(IONodeType.LOAD_MODEL, ModelKey.FLUX1)
    pins: InputPins = {**pair.engine.run_node(load, {}, NodeContext(metadata={"log": log}))}
    noise = TensorPoolKey(500, TensorKey.NOISE)
    put_everywhere(pair, noise, 1)
    node_def = NodeDef(InferNodeType.GENERATE, ModelKey.FLUX1)
    context = NodeContext(sample_config=SampleConfig(steps=2), metadata={"log": log})
    pair.engine.run_node(node_def, {**pins, TensorKey.NOISE: noise}, context, run=RUN)
    assert log == [("load", 0), ("load", 1), ("generate", 0), ("generate", 1)]
    for executor in pair.ranks:
        assert keys_of(executor) == [TensorPoolKey(node_def.node_id, TensorKey.LATENTS)]


def test_steps_run_on_all_ranks_and_report_once(pair: Pair) -> None:
    load = NodeDef(IONodeType.LOAD_MODEL, ModelKey.FLUX1)
    pins: InputPins = {**pair.engine.run_node(load, {}, NodeContext())}
    noise = TensorPoolKey(500, TensorKey.NOISE)
    put_everywhere(pair, noise, 1)
    node_def = NodeDef(InferNodeType.GENERATE, ModelKey.FLUX1)
    context = NodeContext(sample_config=SampleConfig(steps=2))
    pair.engine.open_generate(node_def, {**pins, TensorKey.NOISE: noise}, context, run=RUN)
    assert [keys_of(executor) for executor in pair.ranks] == [[], []]
    assert len(pair.engine.step_generate(node_def, (RUN,))) == 1
    assert pair.engine.steps_left(node_def, run=RUN) == 1
    pair.engine.step_generate(node_def, (RUN,))
    assert pair.engine.peek_generate(node_def, run=RUN)["latents"].item() == 3
    pair.engine.close_generate(node_def, run=RUN)
    for executor in pair.ranks:
        latents = executor.get_tensor(TensorKey.LATENTS, run=RUN)
        assert isinstance(latents, Tensor)
        assert latents.item() == 3
    pair.engine.end_run(RUN)
    assert pair.engine.tensor_keys() == ()
    assert pair.tape == []


# -- failures


def test_a_failure_on_rank_0_is_the_same_error_on_every_rank(pair: Pair) -> None:
    node_def, context = NodeDef(InferNodeType.TEXT_ENCODE), NodeContext(metadata={"fail": True})
    seen: list[Exception] = []
    for executor in pair.ranks:  # as two processes would, each for itself
        with pytest.raises(ZeroDivisionError, match="the encoder broke") as caught:
            executor.run_node(node_def, {}, context, run=RUN)
        seen.append(caught.value)
    assert seen[0] is seen[1]
    assert pair.tape == []  # rank 1 waits for no broadcast that never comes
    assert [keys_of(executor) for executor in pair.ranks] == [[], []]


def test_the_engine_lets_every_rank_see_a_failing_command(pair: Pair) -> None:
    latents = TensorPoolKey(500, TensorKey.LATENTS)
    put_everywhere(pair, latents, 1)
    with pytest.raises(ZeroDivisionError, match="the encoder broke"):
        pair.engine.run_node(NodeDef(InferNodeType.TEXT_ENCODE), {}, NodeContext(metadata={"fail": True}), run=RUN)
    assert pair.tape == []
    pair.engine.end_run(RUN)
    assert [executor.tensor_keys() for executor in pair.ranks] == [(), ()]


def test_a_failure_on_rank_1_is_raised_too(pair: Pair) -> None:
    node_def = NodeDef(InferNodeType.GENERATE, ModelKey.FLUX1)
    load = NodeDef(IONodeType.LOAD_MODEL, ModelKey.FLUX1)
    pins: InputPins = {**pair.engine.run_node(load, {}, NodeContext())}
    noise = TensorPoolKey(500, TensorKey.NOISE)
    put_everywhere(pair, noise, 1)
    pair.ranks[1]._pool(RUN).put(noise, torch.tensor([float("nan")]))
    context = NodeContext(sample_config=SampleConfig(steps=2))
    pair.engine.open_generate(node_def, {**pins, TensorKey.NOISE: noise}, context, run=RUN)
    with pytest.raises(ArithmeticError, match="not finite"):
        pair.engine.step_generate(node_def, (RUN,))


def test_pools_are_empty_on_both_ranks_after_the_run_ends(pair: Pair) -> None:
    put_everywhere(pair, TensorPoolKey(500, TensorKey.LATENTS), 3)
    pair.engine.feed_tensors({TensorKey.NOISE: torch.ones(1)}, run=RUN)
    pair.engine.run_node(NodeDef(InferNodeType.TEXT_ENCODE), {}, NodeContext(), run=RUN)
    assert all(len(keys_of(executor)) == 3 for executor in pair.ranks)
    pair.engine.end_run(RUN)
    assert [executor.tensor_keys() for executor in pair.ranks] == [(), ()]


def test_tensor_keys_sees_what_only_another_rank_holds(pair: Pair) -> None:
    key = TensorPoolKey(500, TensorKey.LATENTS)
    pair.ranks[1]._pool(RUN).put(key, torch.ones(1))
    assert pair.engine.tensor_keys() == ((RUN, key),)


# -- one process


def test_engine_has_the_executors_commands_under_their_names() -> None:
    names = [
        name
        for name, member in inspect.getmembers(Executor, inspect.isfunction)
        if not name.startswith("_") and name != "shutdown"
    ]
    assert len(names) == 19
    for name in names:
        own, theirs = (inspect.signature(getattr(cls, name)) for cls in (Engine, Executor))
        assert own.parameters.keys() == theirs.parameters.keys(), name
        assert getattr(Engine, name).__name__ == name


def test_single_engine_runs_on_the_named_device() -> None:
    (executor,) = Engine.single("cpu").executors
    assert executor.device_info.compute_device == torch.device("cpu")
    assert (executor.device_info.rank_id, executor.device_info.world_size) == (0, 1)


def test_default_device_is_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, name in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        (executor,) = Engine.single().executors
        assert executor.device_info.compute_device.type == name


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "device 'gpu' is unknown"),
        ("meta", "device 'meta' is not supported"),
        ("cuda:99", "device 'cuda:99' is not there; this machine has"),
    ],
)
def test_devices_that_cannot_be_used_are_refused(device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine.single(device)


def test_more_ranks_than_this_build_runs_are_refused() -> None:
    with pytest.raises(ConfigError, match="asks for 4 ranks; this build runs one process"):
        Engine.single("cpu", ParallelConfig(tp=2, cfg=2))


def test_the_default_engine_is_one_until_it_is_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_default", None)
    first = Engine.get_default()
    assert Engine.get_default() is first
    first.put_tensors({TensorPoolKey(500, TensorKey.NOISE): torch.ones(1)}, run=RUN)
    Engine.single("cpu").shutdown()  # another engine's shutdown is not the default's
    assert Engine.get_default() is first
    first.shutdown()
    assert first.tensor_keys() == ()
    assert Engine.get_default() is not first
