"""GeneratorRunner: the one denoising loop, as three calls. Called by the GENERATE node."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from kdit.errors import InputError, NonFiniteError
from kdit.generators.denoise_state import Branch, DenoiseState, Guidance, Scheduler
from kdit.generators.generator_context import GeneratorInferContext
from kdit.generators.generator_def import GeneratorDef
from kdit.generators.scheduler import SETTINGS_ERRORS, make_scheduler, scheduler_step
from kdit.keys import TensorKey
from kdit.models.network import Network
from kdit.models.prepare import prepare_mod, prepare_static
from kdit.models.rows import Cond, ModTable, Rows, Static
from kdit.models.stack import predict
from kdit.nodes.core.step_report import StepReport


@final
class GeneratorRunner:
    """Denoises requests as ``definition`` describes. Holds no state of any request."""

    def __init__(self, definition: GeneratorDef) -> None:
        self.definition = definition

    def prepare(self, ctx: GeneratorInferContext) -> DenoiseState:
        """Latents, schedule, conditioning and everything that no step changes.

        Raises InputError for an input that the family does not take, or of a form that it cannot use.
        """
        latent, denoise = self.definition.latent, self.definition.denoise
        ctx = self._with_latents_read(ctx)
        noise_shape = tuple(ctx.base_latent.latent.shape[1:])
        network = denoise.select_network(ctx.networks, ctx)
        rng = tuple(torch.Generator("cpu").manual_seed(seed) for seed in ctx.seeds)
        latents = latent.pack(_initial_noise(ctx, noise_shape, rng, network.dtype)).to(ctx.device)
        assert ctx.sample_config.steps is not None
        scheduler = self.schedule(ctx.scheduler_config, ctx.sample_config.steps, noise_shape)
        conds, guidance = self._conditioning(ctx)
        cond = {key: torch.cat([c[key] for c in conds]) for key in conds[0]}
        static = prepare_static(network, cond, noise_shape)
        times = denoise.model_times(scheduler.timesteps, network.dtype).to(ctx.device)
        inline = ctx.execute_config.modulation == "inline"
        mod = None if inline else prepare_mod(network, times, cond)
        return DenoiseState(
            run=ctx.run,
            model_key=self.definition.model_key,
            step_index=0,
            latents=latents,
            scheduler=scheduler,
            guidance=guidance,
            branches=_branches(len(conds), ctx.num_samples, static, mod),
            rng=rng,
            network=network,
            noise_shape=noise_shape,
            model_times=times,
            static=static,
            mod=mod,
            cond=cond if inline else None,
        )

    def schedule(
        self, scheduler_config: Mapping[str, object], num_steps: int, noise_shape: tuple[int, ...]
    ) -> Scheduler:
        """A scheduler with its timesteps; needs no network, so that it can be tried before weights are loaded."""
        scheduler = make_scheduler(scheduler_config)
        where = f"{num_steps} steps for latents {noise_shape}: {type(scheduler).__name__} of this checkpoint"
        try:
            with np.errstate(all="ignore"):  # what comes of a division by zero is refused below
                self.definition.denoise.set_timesteps(scheduler, num_steps, noise_shape)
        except SETTINGS_ERRORS as error:
            raise InputError(f"{where} makes no schedule: {error}") from error
        if not bool(torch.isfinite(scheduler.timesteps).all()):
            raise InputError(f"{where} gives timesteps that are not finite")
        return scheduler

    def _with_latents_read(self, ctx: GeneratorInferContext) -> GeneratorInferContext:
        """The context with its latents as the family's handler wants them."""
        given = {TensorKey.AUX_LATENT: ctx.aux_latent, TensorKey.VACE_CONTEXT: ctx.vace_context}
        self.definition.check_inputs(key for key, value in given.items() if value is not None)
        latent = self.definition.latent
        return replace(
            ctx,
            base_latent=latent.preprocess_base_latent(ctx.base_latent, ctx),
            aux_latent=latent.preprocess_aux_latent(ctx.aux_latent, ctx),
        )

    def _conditioning(self, ctx: GeneratorInferContext) -> tuple[list[Cond], Guidance]:
        """Conditioning of each branch, positive first, and how they are combined."""
        positive = self.definition.text.conditioning(ctx.positive, ctx)
        if ctx.negative is None:
            return [positive], Guidance("none")
        assert ctx.sample_config.cfg_scale is not None
        negative = self.definition.text.conditioning(ctx.negative, ctx)
        for key in positive:
            if positive[key].shape != negative[key].shape:
                raise InputError(
                    f"POSITIVE and NEGATIVE differ in {key}: {tuple(positive[key].shape)} and "
                    f"{tuple(negative[key].shape)}; with guidance they share a forward and must agree"
                )
        return [positive, negative], Guidance("cfg", ctx.sample_config.cfg_scale)

    def step(self, states: Sequence[DenoiseState]) -> tuple[StepReport, ...]:
        """One denoising step of every state, in one forward.

        The states may stand at different steps and have different seeds and guidance values; their
        ``batch_key`` must be equal. A prediction that is not finite raises before any state has moved.
        """
        started = time.perf_counter()
        denoise = self.definition.denoise
        assert states and all(s.steps_left for s in states), "a finished state was stepped"
        if len({s.batch_key() for s in states}) > 1:
            raise InputError("these requests cannot share a step: latent shape, text length or guidance kind differ")
        for state in states:
            denoise.before_step(state)
        rows = _join_rows(states)
        output = predict(states[0].network, rows)
        if not bool(torch.isfinite(output).all()):
            raise NonFiniteError(_first_non_finite(states, output))
        reports = []
        for state, part in zip(states, output.split([s.num_rows for s in states]), strict=True):
            predictions = part.unflatten(0, (len(state.branches), -1))
            velocity = denoise.guide(predictions, state.guidance)
            state.latents = scheduler_step(state.scheduler, velocity, state.step_index, state.latents, state.rng)
            state.prediction = predictions
            state.step_index += 1
            denoise.after_step(state)
            reports.append(_report(state, time.perf_counter() - started))
        return tuple(reports)

    def finish(self, state: DenoiseState) -> Tensor:
        """The denoised latents [B, C, (F,) H, W]."""
        if not bool(torch.isfinite(state.latents).all()):
            raise NonFiniteError(f"denoise, end: the latents of run {state.run} hold NaN or infinity")
        return self.definition.latent.unpack(state.latents, state.noise_shape)

    def run(self, ctx: GeneratorInferContext, on_step: Callable[[StepReport], None] | None = None) -> Tensor:
        """``prepare``, every ``step``, ``finish``."""
        state = self.prepare(ctx)
        while state.steps_left:
            (report,) = self.step([state])
            if on_step is not None:
                on_step(report)
        return self.finish(state)


def _report(state: DenoiseState, seconds: float) -> StepReport:
    done = state.step_index - 1
    return StepReport(
        run=state.run,
        step_index=done,
        num_steps=state.num_steps,
        timestep=float(state.scheduler.timesteps[done]),
        seconds=seconds,
    )


def _initial_noise(
    ctx: GeneratorInferContext, shape: tuple[int, ...], rng: tuple[torch.Generator, ...], dtype: torch.dtype
) -> Tensor:
    """Drawn on the CPU, one generator per sample, in the network's dtype, as diffusers draws it."""
    if ctx.noise is not None:
        expected = (ctx.num_samples, *shape)
        if tuple(ctx.noise.shape) != expected:
            raise InputError(f"fed NOISE has shape {tuple(ctx.noise.shape)}, expected {expected}")
        return ctx.noise.to(dtype)
    return torch.cat([torch.randn((1, *shape), generator=g, dtype=dtype) for g in rng])


def _branches(num_branches: int, num_samples: int, static: Static, mod: ModTable | None) -> tuple[Branch, ...]:
    return tuple(
        Branch(
            "negative" if i else "positive",
            static.narrow(i * num_samples, num_samples),
            None if mod is None else mod.narrow(i * num_samples, num_samples),
        )
        for i in range(num_branches)
    )


def _join_rows(states: Sequence[DenoiseState]) -> Rows:
    latents = torch.cat([s.latents for s in states for _ in s.branches])
    per_state = [_mod_now(s.network, s) for s in states]
    mod = per_state[0] if len(states) == 1 else tuple(torch.cat(parts) for parts in zip(*per_state, strict=True))
    return Rows(latents, mod, Static.cat([s.static for s in states]), tuple(range(latents.shape[0])))


def _mod_now(network: Network, state: DenoiseState) -> tuple[Tensor, ...]:
    if state.mod is not None:
        return state.mod.at(state.step_index)
    assert state.cond is not None
    now = state.model_times[state.step_index : state.step_index + 1]
    return prepare_mod(network, now, state.cond).at(0)


def _first_non_finite(states: Sequence[DenoiseState], output: Tensor) -> str:
    for state, part in zip(states, output.split([s.num_rows for s in states]), strict=True):
        if not bool(torch.isfinite(part).all()):
            return (
                f"denoise, step {state.step_index + 1} of {state.num_steps}: the network's output for run "
                f"{state.run} holds NaN or infinity; check the weights, or use another dtype"
            )
    raise AssertionError("called without a non-finite value")
