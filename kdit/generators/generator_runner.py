"""GeneratorRunner: the one denoising loop, as three calls. Called by the GENERATE node."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from kdit.errors import InputError, NonFiniteError
from kdit.generators.denoise_state import Branch, DenoiseState, Guidance
from kdit.generators.generator_context import GeneratorInferContext
from kdit.generators.generator_def import GeneratorDef
from kdit.generators.scheduler import make_scheduler
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
        """Latents, schedule, conditioning and everything that no step changes."""
        text, latent, denoise = self.definition.text, self.definition.latent, self.definition.denoise
        base = latent.preprocess_base_latent(ctx.base_latent, ctx)
        noise_shape = tuple(base.latent.shape[1:])
        network = denoise.select_network(ctx.networks, ctx)
        rng = tuple(torch.Generator("cpu").manual_seed(seed) for seed in ctx.seeds)
        latents = latent.pack(_initial_noise(ctx, noise_shape, rng, network.dtype)).to(ctx.device)
        steps, scale = ctx.sample_config.steps, ctx.sample_config.cfg_scale
        assert steps is not None
        scheduler = make_scheduler(ctx.scheduler_config)
        denoise.set_timesteps(scheduler, steps, noise_shape)
        conds = [text.conditioning(ctx.positive, ctx)]
        if ctx.negative is None:
            guidance = Guidance("none")
        else:
            assert scale is not None
            guidance = Guidance("cfg", scale)
            conds.append(text.conditioning(ctx.negative, ctx))
        cond = {key: torch.cat([c[key] for c in conds]) for key in conds[0]}
        static = prepare_static(network, cond, noise_shape)
        times = denoise.model_times(scheduler.timesteps, network.dtype).to(ctx.device)
        mod = prepare_mod(network, times, cond) if ctx.execute_config.modulation == "table" else None
        return DenoiseState(
            run=ctx.run,
            model_key=self.definition.model_key,
            step_index=0,
            latents=latents,
            scheduler=scheduler,
            guidance=guidance,
            branches=_branches(conds, static, mod),
            rng=rng,
            network=network,
            noise_shape=noise_shape,
            model_times=times,
            cond=cond,
            static=static,
            mod=mod,
        )

    def step(self, states: Sequence[DenoiseState]) -> tuple[StepReport, ...]:
        """One denoising step of every state, in one forward.

        The states may stand at different steps and have different seeds and guidance values; their
        ``batch_key`` must be equal. On an error no state has moved.
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
            timestep = state.scheduler.timesteps[state.step_index]
            (state.latents, *_) = state.scheduler.step(velocity, timestep, state.latents, return_dict=False)
            state.prediction = predictions
            state.step_index += 1
            denoise.after_step(state)
            reports.append(_report(state, float(timestep), time.perf_counter() - started))
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


def _report(state: DenoiseState, timestep: float, seconds: float) -> StepReport:
    return StepReport(
        run=state.run, step_index=state.step_index - 1, num_steps=state.num_steps, timestep=timestep, seconds=seconds
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


def _branches(conds: list[Cond], static: Static, mod: ModTable | None) -> tuple[Branch, ...]:
    count = next(iter(conds[0].values())).shape[0]
    return tuple(
        Branch(
            "negative" if i else "positive",
            cond,
            static.narrow(i * count, count),
            None if mod is None else mod.narrow(i * count, count),
        )
        for i, cond in enumerate(conds)
    )


def _join_rows(states: Sequence[DenoiseState]) -> Rows:
    latents = torch.cat([s.latents for s in states for _ in s.branches])
    per_state = [_mod_now(s.network, s) for s in states]
    mod = per_state[0] if len(states) == 1 else tuple(torch.cat(parts) for parts in zip(*per_state, strict=True))
    return Rows(latents, mod, Static.cat([s.static for s in states]), tuple(range(latents.shape[0])))


def _mod_now(network: Network, state: DenoiseState) -> tuple[Tensor, ...]:
    if state.mod is not None:
        return state.mod.at(state.step_index)
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
