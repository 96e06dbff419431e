"""GENERATE: the denoising loop as a node, whole or step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from kdit.errors import InputError
from kdit.generators.denoise_state import DenoiseState
from kdit.generators.generator_context import AuxLatent, BaseLatent, GeneratorInferContext, SkipLayers
from kdit.generators.generator_runner import GeneratorRunner
from kdit.generators.registry import generator_def
from kdit.keys import InferNodeType, ModelKey, ModelKind, TensorKey
from kdit.models.network import Network
from kdit.nodes.core.factory import InferNodeFactory
from kdit.nodes.core.metadata import read_metadata
from kdit.nodes.core.node import SteppableNode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.core.pin_hub import PinHub
from kdit.nodes.core.step_report import StepReport


@dataclass(frozen=True)
class GenerateSettings:
    """The node's metadata."""

    seeds: tuple[int, ...]  # one per sample
    scheduler_config: dict[str, object]
    earlier_draws: tuple[str, ...] = ()  # dtypes of what each sample's generator has drawn before the noise
    expert_boundary: float | None = None  # of two experts, the first runs at timesteps from here up
    skip_layers: SkipLayers | None = None
    rows_per_forward: int | None = None  # None: all rows in one
    aux_of_samples: tuple[tuple[int, ...], ...] | None = None  # positions in AUX_LATENT of each sample's own tensors


@InferNodeFactory.register(InferNodeType.GENERATE, ModelKey.of_kind(ModelKind.NETWORK))
class GeneratorNode(SteppableNode):
    """Builds the context of the GeneratorRunner from its pins and puts the denoised LATENTS."""

    input_defs: ClassVar[list[PinDef]] = [
        TensorKey.POSITIVE,
        TensorKey.NEGATIVE,
        TensorKey.BASE_LATENT,
        TensorKey.AUX_LATENT,
        TensorKey.VACE_CONTEXT,
        TensorKey.NOISE,
    ]
    output_defs: ClassVar[list[PinDef]] = [TensorKey.LATENTS]

    def open(self, pins: PinHub, *, context: NodeContext) -> DenoiseState:
        """Prepare the state of one request."""
        settings = read_metadata(GenerateSettings, context)
        sample_config, execute_config, device = context.sample_config, context.execute_config, context.device
        assert sample_config is not None and execute_config is not None and device is not None
        num_samples = len(settings.seeds)
        positive, negative = _tensors(pins, TensorKey.POSITIVE), _tensors(pins, TensorKey.NEGATIVE)
        base, noise = _tensors(pins, TensorKey.BASE_LATENT), _tensor(pins, TensorKey.NOISE)
        if not positive or not base:
            missing = "BASE_LATENT" if positive else "POSITIVE"
            raise InputError(f"GENERATE has no {missing}; connect the node that makes it, or feed it")
        _check_samples(TensorKey.POSITIVE, positive, num_samples)
        _check_samples(TensorKey.NEGATIVE, negative, num_samples)
        _check_samples(TensorKey.BASE_LATENT, base, num_samples)
        if len(base) > 2:
            raise InputError(f"BASE_LATENT of GENERATE is a latent, or a latent and a mask; got {len(base)} tensors")
        aux = pins.get_tensor(TensorKey.AUX_LATENT)
        model_key = pins.node_def.model_key
        assert model_key is not None
        keys = (model_key, *pins.node_def.models)
        ctx = GeneratorInferContext(
            run=pins.run,
            networks={key: cast(Network, pins.get_model(key)) for key in keys},
            positive=positive,
            negative=negative or None,
            base_latent=BaseLatent(*base),
            aux_latent=None if aux is None else AuxLatent(aux.data, settings.aux_of_samples),
            vace_context=_tensor(pins, TensorKey.VACE_CONTEXT),
            noise=noise,
            seeds=settings.seeds,
            earlier_draws=tuple(getattr(torch, name) for name in settings.earlier_draws),
            expert_boundary=settings.expert_boundary,
            skip_layers=settings.skip_layers,
            rows_per_forward=settings.rows_per_forward,
            sample_config=sample_config,
            execute_config=execute_config,
            scheduler_config=settings.scheduler_config,
            device=device.compute_device,
        )
        return GeneratorRunner(generator_def(model_key)).prepare(ctx)

    def step(self, states: Sequence[object]) -> tuple[StepReport, ...]:
        """One denoising step of several requests in one forward."""
        own = [cast(DenoiseState, state) for state in states]
        return _runner(own[0]).step(own)

    def steps_left(self, state: object) -> int:
        """Steps that ``state`` still has to run."""
        return cast(DenoiseState, state).steps_left

    def peek(self, state: object) -> dict[str, Tensor]:
        """Latents (spatial) and the schedule; after the first step also the last prediction of each branch."""
        own = cast(DenoiseState, state)
        seen = {
            "latents": _runner(own).definition.latent.unpack(own.latents, own.noise_shape),
            "timesteps": own.timesteps.clone(),
        }
        if own.prediction is not None:
            seen["prediction"] = own.prediction
        return seen

    def close(self, state: object, pins: PinHub) -> None:
        """Put the result."""
        own = cast(DenoiseState, state)
        pins.put_tensor(TensorKey.LATENTS, _runner(own).finish(own))


def _runner(state: DenoiseState) -> GeneratorRunner:
    return GeneratorRunner(generator_def(state.model_key))


def _tensors(pins: PinHub, key: TensorKey) -> list[Tensor]:
    value = pins.get_tensor(key)
    if value is None:
        return []
    return value.data if isinstance(value.data, list) else [value.data]


def _tensor(pins: PinHub, key: TensorKey) -> Tensor | None:
    tensors = _tensors(pins, key)
    if len(tensors) > 1:
        raise InputError(f"{key.name} of GENERATE must be one tensor, got a list of {len(tensors)}")
    return tensors[0] if tensors else None


def _check_samples(key: TensorKey, tensors: list[Tensor], num_samples: int) -> None:
    for tensor in tensors:
        held = tensor.shape[0] if tensor.ndim else "no"
        if held != num_samples:
            raise InputError(f"{key.name} holds {held} samples, expected {num_samples}")
