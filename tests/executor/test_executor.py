import logging
import threading

import pytest
import torch
from torch import Tensor

from kdit.config import SampleConfig
from kdit.errors import GraphError, InputError, PinError
from kdit.executor.executor import Executor
from kdit.keys import MAIN, InferNodeType, IONodeType, ModelKey, RunId, TensorKey
from kdit.nodes.core.factory import InferNodeFactory
from kdit.nodes.core.node import InferNode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.core.pin_def import InputPins
from kdit.nodes.core.pin_hub import PinHub
from kdit.tensor.tensor_pool_key import STAGING_NODE_ID, TensorPoolKey
from tests.executor.fakes import install_fakes, single_executor

A, B = RunId("a"), RunId("b")


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Executor:
    install_fakes(monkeypatch)
    return single_executor()


def encode_def() -> NodeDef:
    return NodeDef(InferNodeType.TEXT_ENCODE)


def tensor(data: object) -> Tensor:
    assert isinstance(data, Tensor)
    return data


def generate_pins(executor: Executor, *runs: RunId, start: float = 0.0) -> InputPins:
    """A loaded network, and noise on a pin of a node 500 in each run."""
    load = NodeDef(IONodeType.LOAD_MODEL, ModelKey.FLUX1)
    pins: InputPins = {**executor.run_node(load, {}, NodeContext())}
    noise = TensorPoolKey(500, TensorKey.NOISE)
    for run in runs:
        executor.register_tensor(noise, 1, run=run)
        executor.put_tensors({noise: torch.full((1,), start)}, run=run)
    return {**pins, TensorKey.NOISE: noise}


def steps(count: int) -> NodeContext:
    return NodeContext(sample_config=SampleConfig(steps=count))


# -- run_node


def test_outputs_say_what_was_written(executor: Executor) -> None:
    node_def = encode_def()
    positive = TensorPoolKey(node_def.node_id, TensorKey.POSITIVE)
    assert executor.run_node(node_def, {}, NodeContext()) == {TensorKey.POSITIVE: positive}
    assert executor.tensor_keys() == ((MAIN, positive),)
    both = executor.run_node(node_def, {}, NodeContext(negative_prompt="x"), run=A)
    assert set(both) == {TensorKey.POSITIVE, TensorKey.NEGATIVE}


def test_the_context_handed_to_a_node_is_a_copy_with_the_device(executor: Executor) -> None:
    log: list[tuple[str, int]] = []
    context = NodeContext(metadata={"log": log})
    executor.run_node(encode_def(), {}, context)
    assert log == [("encode", 0)]  # the fake notes nothing without a device
    assert context.device is None


def test_inputs_are_consumed_after_the_node_ran(executor: Executor) -> None:
    latents = TensorPoolKey(500, TensorKey.LATENTS)
    executor.register_tensor(latents, 2)
    executor.put_tensors({latents: torch.ones(1)})
    decode = NodeDef(InferNodeType.VAE_DECODE)
    executor.run_node(decode, {TensorKey.LATENTS: latents}, NodeContext())
    assert (MAIN, latents) in executor.tensor_keys()
    out = executor.run_node(decode, {TensorKey.LATENTS: latents}, NodeContext())
    assert executor.tensor_keys() == ((MAIN, TensorPoolKey(decode.node_id, TensorKey.IMAGE)),)
    assert tensor(executor.get_tensor(TensorKey.IMAGE)).item() == 10
    assert set(out) == {TensorKey.IMAGE}


def test_consume_tensor_and_clear_free_by_hand(executor: Executor) -> None:
    keys = [TensorPoolKey(500 + i, TensorKey.LATENTS) for i in range(3)]
    executor.put_tensors({key: torch.ones(1) for key in keys}, run=A)
    executor.put_tensors({keys[0]: torch.ones(1)}, run=B)
    executor.register_tensor(keys[0], 1, run=A)
    executor.consume_tensor(keys[0], run=A)
    executor.consume_tensor(keys[0], run=RunId("unknown"))
    assert executor.tensor_keys() == ((A, keys[1]), (A, keys[2]), (B, keys[0]))
    executor.clear_all_tensors([keys[2]], run=A)
    executor.clear_all_tensors(run=RunId("unknown"))
    assert executor.tensor_keys() == ((A, keys[2]), (B, keys[0]))


def test_a_failing_node_leaves_no_outputs_and_keeps_its_inputs(executor: Executor) -> None:
    node_def = encode_def()
    with pytest.raises(ZeroDivisionError, match="the encoder broke"):  # after it has written POSITIVE
        executor.run_node(node_def, {}, NodeContext(metadata={"fail": True}), run=A)
    assert executor.tensor_keys() == ()

    latents = TensorPoolKey(500, TensorKey.LATENTS)
    executor.register_tensor(latents, 1, run=A)
    executor.put_tensors({latents: [torch.ones(1)]}, run=A)
    with pytest.raises(AssertionError):  # the fake decoder takes no lists
        executor.run_node(NodeDef(InferNodeType.VAE_DECODE), {TensorKey.LATENTS: latents}, NodeContext(), run=A)
    assert executor.tensor_keys() == ((A, latents),)
    executor.end_run(A)
    assert executor.tensor_keys() == ()


def test_an_interrupt_leaves_no_outputs_either(executor: Executor) -> None:
    class Interrupted(InferNode):
        output_defs = [TensorKey.VIDEO]  # noqa: RUF012

        def run(self, pins: PinHub, *, context: NodeContext) -> None:
            pins.put_tensor(TensorKey.VIDEO, torch.ones(1))
            raise KeyboardInterrupt

    InferNodeFactory.register(InferNodeType.VAE_COMPUTE_SHAPE, [None])(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        executor.run_node(NodeDef(InferNodeType.VAE_COMPUTE_SHAPE), {}, NodeContext())
    assert executor.tensor_keys() == ()
    executor.run_node(encode_def(), {}, NodeContext())  # and the lock is free


def test_a_missing_input_is_named_before_the_node_runs(executor: Executor) -> None:
    log: list[tuple[str, int]] = []
    pins: InputPins = {TensorKey.LATENTS: TensorPoolKey(77, TensorKey.LATENTS)}
    with pytest.raises(PinError, match=r"input LATENTS, 77\.LATENTS, is not on rank 0 in run a"):
        executor.run_node(NodeDef(InferNodeType.VAE_DECODE), pins, NodeContext(metadata={"log": log}), run=A)
    assert log == []


def test_nodes_are_cached_by_id(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    class Counted(InferNode):
        def __init__(self) -> None:
            made.append(self)

        def run(self, pins: PinHub, *, context: NodeContext) -> None:
            assert torch.is_inference_mode_enabled()

    InferNodeFactory.register(InferNodeType.VAE_COMPUTE_SHAPE, [None])(Counted)
    first, second = NodeDef(InferNodeType.VAE_COMPUTE_SHAPE), NodeDef(InferNodeType.VAE_COMPUTE_SHAPE)
    for node_def in (first, first, second):
        executor.run_node(node_def, {}, NodeContext())
    assert len(made) == 2
    executor.clear_models()
    executor.run_node(first, {}, NodeContext())
    assert len(made) == 3
    assert not torch.is_inference_mode_enabled()


def test_models_outlive_runs_until_cleared(executor: Executor) -> None:
    pins = generate_pins(executor, A)
    executor.end_run(MAIN)
    node_def = NodeDef(InferNodeType.GENERATE, ModelKey.FLUX1)
    executor.open_generate(node_def, pins, steps(1), run=A)
    executor.end_run(A)
    executor.clear_models()
    executor.put_tensors({TensorPoolKey(500, TensorKey.NOISE): torch.ones(1)}, run=A)
    with pytest.raises(PinError, match=r"no model .*FLUX1 is loaded"):
        executor.open_generate(node_def, pins, steps(1), run=A)


# -- feeding and fetching


def test_fed_tensors_wait_in_the_staging_area_of_their_run(executor: Executor) -> None:
    executor.feed_tensors({TensorKey.NOISE: torch.ones(1), TensorKey.POSITIVE: [torch.ones(2)]}, run=A)
    staged = [(A, TensorPoolKey(STAGING_NODE_ID, key)) for key in (TensorKey.NOISE, TensorKey.POSITIVE)]
    assert list(executor.tensor_keys()) == staged
    assert executor.get_tensor(TensorKey.NOISE, run=A).tolist() == [1]  # type: ignore[union-attr]
    output = TensorPoolKey(7, TensorKey.NOISE)
    executor.put_tensors({output: torch.zeros(1)}, run=A)
    assert executor.get_tensor(TensorKey.NOISE, run=A).tolist() == [0]  # type: ignore[union-attr]  # a node's output first


def test_bare_keys_put_get_and_keep_tensors(executor: Executor) -> None:
    executor.put_tensors({TensorKey.IMAGE: torch.ones(1), TensorKey.NOISE: torch.ones(2)})
    assert executor.get_tensor(TensorKey.IMAGE).tolist() == [1]  # type: ignore[union-attr]
    executor.put_tensors({TensorPoolKey(3, TensorKey.IMAGE): torch.ones(3)})
    executor.clear_all_tensors(exclude=[TensorKey.IMAGE])
    assert {key.pin for _, key in executor.tensor_keys()} == {TensorKey.IMAGE} and len(executor.tensor_keys()) == 2
    executor.clear_all_tensors(exclude=[TensorPoolKey(3, TensorKey.IMAGE)])
    assert [key.node_id for _, key in executor.tensor_keys()] == [3]
    with pytest.raises(PinError, match="0 tensors are named NOISE"):
        executor.get_tensor(TensorKey.NOISE)


def test_what_was_released_goes_at_once_or_before_the_next_command(executor: Executor) -> None:
    executor.put_tensors({TensorKey.NOISE: torch.ones(1)}, run=A)
    executor.release_later(A)
    assert A not in executor._tensor_pools
    executor.put_tensors({TensorKey.NOISE: torch.ones(1)}, run=A)
    with executor._lock:  # as a collector finds it in the middle of a command
        executor.release_later(A)
        assert A in executor._tensor_pools
    assert executor.tensor_keys() == ()


@pytest.mark.parametrize("bad", [None, 3, (torch.ones(1),), [torch.ones(1), "x"]])
def test_only_tensors_can_be_fed(executor: Executor, bad: object) -> None:
    with pytest.raises(InputError, match=r"NOISE: got (NoneType|int|tuple|str), expected a tensor or a list"):
        executor.feed_tensors({TensorKey.POSITIVE: torch.ones(1), TensorKey.NOISE: bad})  # type: ignore[dict-item]
    with pytest.raises(InputError, match="NOISE: got"):
        executor.put_tensors({TensorPoolKey(1, TensorKey.NOISE): bad})  # type: ignore[dict-item]
    assert executor.tensor_keys() == ()


def test_get_tensor_by_name_needs_exactly_one(executor: Executor) -> None:
    first, second = TensorPoolKey(500, TensorKey.IMAGE), TensorPoolKey(501, TensorKey.IMAGE)
    executor.put_tensors({first: torch.ones(1)}, run=A)
    assert tensor(executor.get_tensor(TensorKey.IMAGE, run=A)).item() == 1
    executor.put_tensors({second: torch.zeros(1)}, run=A)
    with pytest.raises(PinError, match=r"2 tensors are named IMAGE, expected one; there are 500\.IMAGE, 501\.IMAGE"):
        executor.get_tensor(TensorKey.IMAGE, run=A)
    assert tensor(executor.get_tensor(second, run=A)).item() == 0
    with pytest.raises(PinError, match=r"0 tensors are named VIDEO, expected one; there are 500\.IMAGE, 501\.IMAGE"):
        executor.get_tensor(TensorKey.VIDEO, run=A)
    with pytest.raises(PinError, match="there are none"):
        executor.get_tensor(TensorKey.IMAGE, run=RunId("unknown"))
    assert {run for run, _ in executor.tensor_keys()} == {A}


def test_a_list_comes_out_as_a_copy(executor: Executor) -> None:
    key = TensorPoolKey(500, TensorKey.POSITIVE)
    executor.put_tensors({key: [torch.ones(1)]})
    got = executor.get_tensor(key)
    assert isinstance(got, list)
    got.clear()
    again = executor.get_tensor(key)
    executor.end_run(MAIN)
    assert len(again) == 1


# -- runs


def test_runs_do_not_see_each_others_tensors(executor: Executor) -> None:
    key = TensorPoolKey(500, TensorKey.LATENTS)
    executor.put_tensors({key: torch.ones(1)}, run=A)
    executor.put_tensors({key: torch.zeros(1)}, run=B)
    assert tensor(executor.get_tensor(key, run=A)).item() == 1
    executor.end_run(A)
    executor.end_run(A)
    executor.end_run(RunId("unknown"))
    assert executor.tensor_keys() == ((B, key),)
    assert tensor(executor.get_tensor(key, run=B)).item() == 0


def test_shutdown_ends_everything_and_can_be_repeated(executor: Executor) -> None:
    pins = generate_pins(executor, A, B)
    node_def = NodeDef(InferNodeType.GENERATE, ModelKey.FLUX1)
    executor.open_generate(node_def, pins, steps(1), run=A)
    executor.shutdown()
    executor.shutdown()
    assert executor.tensor_keys() == ()
    with pytest.raises(InputError, match="is not open for run a"):
        executor.peek_generate(node_def, run=A)


# -- steppable nodes


def test_stepping_equals_running(executor: Executor) -> None:
    pins = generate_pins(executor, A, B, start=5.0)
    node_def = NodeDef(InferNodeType.GENERATE, ModelKey.FLUX1)
    executor.run_node(node_def, pins, steps(3), run=A)
    executor.open_generate(node_def, pins, steps(3), run=B)
    while executor.steps_left(node_def, run=B):
        executor.step_generate(node_def, (B,))
    out = executor.close_generate(node_def, run=B)
    assert out == {TensorKey.LATENTS: TensorPoolKey(node_def.node_id, TensorKey.LATENTS)}
    assert [tensor(executor.get_tensor(TensorKey.LATENTS, run=run)).item() for run in (A, B)] == [8, 8]


def test_opening_consumes_the_inputs_and_closing_drops_the_state(executor: Executor) -> None:
    pins = generate_pins(executor, A)
    node_def = NodeDef(InferNodeType.GENERATE, ModelKey.FLUX1)
    executor.open_generate(node_def, pins, steps(1), run=A)
    assert executor.tensor_keys() == ()
    executor.step_generate(node_def, (A,))
    executor.close_generate(node_def, run=A)
    with pytest.raises(InputError, match="is not open for run a; open runs: none"):
        executor.close_generate(node_def, run=A)


def test_runs_join_and_leave_between_steps(executor: Executor) -> None:
    pins = generate_pins(executor, A, B)
    node_def = NodeDef(InferNodeType.GENERATE, ModelKey.FLUX1)
    executor.open_generate(node_def, pins, steps(2), run=A)
    (report,) = executor.step_generate(node_def, (A,))
    assert (report.run, report.step_index, report.num_steps) == (A, 0, 2)
    executor.open_generate(node_def, pins, steps(5), run=B)
    reports = executor.step_generate(node_def, (B, A))
    assert [(r.run, r.step_index, r.num_steps) for r in reports] == [(B, 0, 5), (A, 1, 2)]
    assert executor.steps_left(node_def, run=A) == 0
    executor.close_generate(node_def, run=A)
    executor.step_generate(node_def, (B,))
    assert executor.peek_generate(node_def, run=B)["latents"].item() == 2
    executor.end_run(B)  # cancelled
    with pytest.raises(InputError, match="is not open for run b"):
        executor.step_generate(node_def, (B,))


def test_a_failing_step_leaves_all_states_as_they_were(executor: Executor) -> None:
    pins = generate_pins(executor, B)
    generate_pins(executor, A, start=float("nan"))
    node_def = NodeDef(InferNodeType.GENERATE, ModelKey.FLUX1)
    for run in (A, B):
        executor.open_generate(node_def, pins, steps(2), run=run)
    executor.step_generate(node_def, (B,))
    with pytest.raises(ArithmeticError, match="not finite"):
        executor.step_generate(node_def, (A, B))
    assert executor.peek_generate(node_def, run=B)["latents"].item() == 1
    assert executor.steps_left(node_def, run=B) == 1
    assert executor.steps_left(node_def, run=A) == 2
    executor.end_run(A)
    (report,) = executor.step_generate(node_def, (B,))
    assert report.step_index == 1


def test_a_failing_close_keeps_the_state_and_no_outputs(executor: Executor) -> None:
    pins = generate_pins(executor, A)
    node_def = NodeDef(InferNodeType.GENERATE, ModelKey.FLUX1)
    executor.open_generate(node_def, pins, steps(1), run=A)
    executor.clear_models()
    with pytest.raises(PinError, match="is loaded"):
        executor.close_generate(node_def, run=A)
    assert executor.tensor_keys() == ()
    assert executor.steps_left(node_def, run=A) == 1


def test_a_failing_open_leaves_nothing_open(executor: Executor) -> None:
    pins = generate_pins(executor, A)
    node_def = NodeDef(InferNodeType.GENERATE, ModelKey.FLUX1)
    with pytest.raises(AssertionError):
        executor.open_generate(node_def, pins, NodeContext(), run=A)  # the fake wants a sample_config
    assert [key.pin for _, key in executor.tensor_keys()] == [TensorKey.NOISE]
    executor.open_generate(node_def, pins, steps(1), run=A)


def test_wrong_calls_are_refused(executor: Executor) -> None:
    pins = generate_pins(executor, A)
    node_def = NodeDef(InferNodeType.GENERATE, ModelKey.FLUX1)
    executor.open_generate(node_def, pins, steps(1), run=A)
    with pytest.raises(InputError, match="is already open for run a"):
        executor.open_generate(node_def, pins, steps(1), run=A)
    for runs in ((), (A, A)):
        with pytest.raises(InputError, match="a step takes each run once, and one at least"):
            executor.step_generate(node_def, runs)
    with pytest.raises(InputError, match="is not open for run b; open runs: a"):
        executor.step_generate(node_def, (A, B))
    with pytest.raises(GraphError, match="does not run in steps; use run_node"):
        executor.open_generate(encode_def(), {}, NodeContext(), run=A)


# -- the command stream


def test_commands_of_several_threads_run_one_at_a_time(executor: Executor) -> None:
    inside, most = [0], [0]
    entered, release = threading.Event(), threading.Event()

    class Slow(InferNode):
        def run(self, pins: PinHub, *, context: NodeContext) -> None:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            entered.set()
            assert release.wait(10)
            inside[0] -= 1

    InferNodeFactory.register(InferNodeType.VAE_COMPUTE_SHAPE, [None])(Slow)
    node_def = NodeDef(InferNodeType.VAE_COMPUTE_SHAPE)
    threads = [threading.Thread(target=executor.run_node, args=(node_def, {}, NodeContext())) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert entered.wait(10)
    threads[1].join(0.05)  # time for the second to come in, if it could
    release.set()
    for thread in threads:
        thread.join(10)
    assert most == [1]
    assert inside == [0]


def test_log_lines_carry_the_run(executor: Executor, caplog: pytest.LogCaptureFixture) -> None:
    node_def = encode_def()
    with caplog.at_level(logging.DEBUG, logger="kdit.executor.executor"), pytest.raises(ZeroDivisionError):
        executor.run_node(node_def, {}, NodeContext(metadata={"fail": True}), run=A)
    assert caplog.messages[0] == f"run a, rank 0: run node {node_def.node_id} (TEXT_ENCODE)"
    assert caplog.messages[-1] == "rank 0: failed with ZeroDivisionError: the encoder broke"
