"""Small nodes of every dispatch policy, and a pair of executors that believe to be two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kdit.config import ParallelConfig
from kdit.engine.engine import Engine
from kdit.executor.distributed_group import DistributedGroupManager
from kdit.executor.executor import Executor
from kdit.keys import InferNodeType, IONodeType, ModelKey, RunId, TensorKey
from kdit.nodes.core import factory
from kdit.nodes.core.device_info import DeviceInfo
from kdit.nodes.core.factory import InferNodeFactory, IONodeFactory
from kdit.nodes.core.node import InferNode, IONode, SteppableNode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.core.pin_hub import PinHub
from kdit.nodes.core.step_report import StepReport
from kdit.nodes.io.feed_tensor import FeedTensorNode
from kdit.nodes.io.fetch_tensor import FetchTensorNode
from kdit.tensor.tensor_value import TensorData


def note(context: NodeContext, name: str) -> None:
    """Write down which rank ran; ``metadata["log"]`` is a list that the test holds."""
    log = context.metadata.get("log")
    if isinstance(log, list) and context.device is not None:
        log.append((name, context.device.rank_id))


class FakeLoader(IONode):
    """LOAD_MODEL: the model is a string."""

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        note(context, "load")
        (key,) = self.output_defs
        assert isinstance(key, ModelKey)
        pins.put_model(key, f"weights of {key.name}")


class FakeTextEncode(InferNode):
    """TEXT_ENCODE, rank 0 and broadcast: POSITIVE always, NEGATIVE with a negative prompt, an error on demand."""

    output_defs: ClassVar[list[PinDef]] = [TensorKey.POSITIVE, TensorKey.NEGATIVE]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        note(context, "encode")
        pins.put_tensor(TensorKey.POSITIVE, [torch.full((1, 2), 3.0), torch.ones(2)])
        if context.metadata.get("fail"):
            raise ZeroDivisionError("the encoder broke")
        if context.negative_prompt is not None:
            pins.put_tensor(TensorKey.NEGATIVE, torch.zeros(1, 2))


@dataclass
class FakeState:
    """The latents are the number of steps taken."""

    run: RunId
    model: object
    latents: Tensor
    num_steps: int
    done: int = 0


class FakeGenerate(SteppableNode):
    """GENERATE, on all ranks: counts. A state whose latents are not finite makes the whole step fail."""

    input_defs: ClassVar[list[PinDef]] = [TensorKey.POSITIVE, TensorKey.NEGATIVE, TensorKey.NOISE]
    output_defs: ClassVar[list[PinDef]] = [TensorKey.LATENTS]

    def open(self, pins: PinHub, *, context: NodeContext) -> object:
        note(context, "generate")
        noise = pins.get_tensor(TensorKey.NOISE)
        assert noise is not None
        assert isinstance(noise.data, Tensor)
        assert torch.is_inference_mode_enabled()
        assert context.sample_config is not None
        assert context.sample_config.steps is not None
        return FakeState(pins.run, pins.get_model(), noise.data, context.sample_config.steps)

    def step(self, states: Sequence[object]) -> tuple[StepReport, ...]:
        own = [state for state in states if isinstance(state, FakeState)]
        if not all(bool(torch.isfinite(state.latents).all()) for state in own):
            raise ArithmeticError("not finite")
        for state in own:
            state.latents, state.done = state.latents + 1, state.done + 1
        return tuple(
            StepReport(run=s.run, step_index=s.done - 1, num_steps=s.num_steps, timestep=0.0, seconds=0.0) for s in own
        )

    def close(self, state: object, pins: PinHub) -> None:
        assert isinstance(state, FakeState)
        assert pins.get_model() == state.model
        pins.put_tensor(TensorKey.LATENTS, state.latents)

    def steps_left(self, state: object) -> int:
        assert isinstance(state, FakeState)
        return state.num_steps - state.done

    def peek(self, state: object) -> dict[str, Tensor]:
        assert isinstance(state, FakeState)
        return {"latents": state.latents}


class FakeDecode(InferNode):
    """VAE_DECODE, rank 0 only: IMAGE = 10 * LATENTS."""

    input_defs: ClassVar[list[PinDef]] = [TensorKey.LATENTS, TensorKey.AUX_LATENT]
    output_defs: ClassVar[list[PinDef]] = [TensorKey.IMAGE]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        note(context, "decode")
        latents = pins.get_tensor(TensorKey.LATENTS)
        assert latents is not None
        assert isinstance(latents.data, Tensor)
        pins.put_tensor(TensorKey.IMAGE, latents.data * 10)


class FakeEncodeImage(InferNode):
    """VAE_ENCODE_SPATIAL: pixels of a start or end picture -> BASE_LATENT."""

    input_defs: ClassVar[list[PinDef]] = [TensorKey.START_IMG, TensorKey.END_IMG]
    output_defs: ClassVar[list[PinDef]] = [TensorKey.BASE_LATENT]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        start, end = pins.get_tensor(TensorKey.START_IMG), pins.get_tensor(TensorKey.END_IMG)
        pins.put_tensor(TensorKey.BASE_LATENT, torch.tensor([start is not None, end is not None]))


class FakeRead(IONode):
    """READ_IMAGE."""

    output_defs: ClassVar[list[PinDef]] = [TensorKey.IMAGE]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        pins.put_tensor(TensorKey.IMAGE, torch.zeros(1, 1, 1, 3))


def install_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the fakes and the two bridges is registered, and no real module is looked up."""
    monkeypatch.setattr(factory, "_MODULES", {})
    monkeypatch.setattr(InferNodeFactory, "_classes", {})
    monkeypatch.setattr(IONodeFactory, "_classes", {})
    IONodeFactory.register(IONodeType.FEED_TENSOR, [None])(FeedTensorNode)
    IONodeFactory.register(IONodeType.FETCH_TENSOR, [None])(FetchTensorNode)
    IONodeFactory.register(IONodeType.LOAD_MODEL, list(ModelKey))(FakeLoader)
    IONodeFactory.register(IONodeType.READ_IMAGE, [None])(FakeRead)
    InferNodeFactory.register(InferNodeType.TEXT_ENCODE, [None, ModelKey.T5TextEncoder])(FakeTextEncode)
    InferNodeFactory.register(InferNodeType.GENERATE, [ModelKey.FLUX1])(FakeGenerate)
    InferNodeFactory.register(InferNodeType.VAE_DECODE, [None, ModelKey.VAE_KL])(FakeDecode)
    InferNodeFactory.register(InferNodeType.VAE_ENCODE_SPATIAL, [None])(FakeEncodeImage)


class RecordingGroup(DistributedGroupManager):
    """Rank 0 records what it tells the others; rank 1, which runs after it, reads that from the tape."""

    def __init__(self, rank_id: int, tape: list[tuple[str, object]]) -> None:
        self._rank_id = rank_id
        self._tape = tape

    @property
    def rank_id(self) -> int:
        return self._rank_id

    @property
    def world_size(self) -> int:
        return 2

    def broadcast_tensors(self, tensors: dict[TensorKey, TensorData] | None) -> dict[TensorKey, TensorData]:
        assert (tensors is not None) == (self._rank_id == 0)
        sent = self._exchange("broadcast", dict(tensors or {}))
        assert isinstance(sent, dict)
        return sent

    def agree(self, error: Exception | None) -> Exception | None:
        first = self._exchange("agree", error)
        assert first is None or isinstance(first, Exception)
        return first or error

    def _exchange(self, what: str, value: object) -> object:
        if self._rank_id == 0:
            self._tape.append((what, value))
            return value
        said, value = self._tape.pop(0)
        assert said == what, f"rank 0 did {said} where rank 1 does {what}"
        return value


@dataclass
class Pair:
    """Two ranks of one replica in one process."""

    ranks: tuple[Executor, Executor]
    engine: Engine
    tape: list[tuple[str, object]]


def single_executor() -> Executor:
    cpu = torch.device("cpu")
    return Executor(DeviceInfo(cpu, cpu, rank_id=0, world_size=1), ParallelConfig(), DistributedGroupManager())


def make_pair() -> Pair:
    cpu = torch.device("cpu")
    tape: list[tuple[str, object]] = []
    first, second = (
        Executor(DeviceInfo(cpu, cpu, rank_id=rank, world_size=2), ParallelConfig(tp=2), RecordingGroup(rank, tape))
        for rank in (0, 1)
    )
    return Pair((first, second), Engine([first, second]), tape)
