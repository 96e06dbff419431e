"""GeneratorRunner: the one denoising loop, as three calls. Called by the GENERATE node."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import final

import numpy as np
import torch
from torch import Tensor

from kdit.errors import InputError, NonFiniteError
from kdit.generators.denoise_state import Branch, DenoiseState, Guidance, Phase, Prepared, Scheduler
from kdit.generators.draws import sample_generator
from kdit.generators.generator_context import GeneratorInferContext
from kdit.generators.generator_def import GeneratorDef
from kdit.generators.scheduler import SETTINGS_ERRORS, begin_at, first_step, make_scheduler, scheduler_step
from kdit.keys import ModelKey, TensorKey
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
        ctx = self._with_latents_read(ctx)
        latent, denoise = self.definition.latent, self.definition.denoise
        noise_shape = tuple(ctx.base_latent.latent.shape[1:])
        dtype = next(iter(ctx.networks.values())).dtype
        rng = tuple(sample_generator(seed, (1, *noise_shape), ctx.earlier_draws) for seed in ctx.seeds)
        noise = _initial_noise(ctx, noise_shape, rng, latent.noise_dtype(dtype)).to(ctx.device)
        sample = ctx.sample_config
        assert sample.steps is not None
        scheduler = self.schedule(ctx.scheduler_config, sample.steps, noise_shape)
        first = first_step(len(scheduler.timesteps), sample.strength)
        if sample.strength is not None:
            noise = begin_at(scheduler, first, ctx.base_latent.latent.to(noise), noise)
        timesteps = scheduler.timesteps[first:]
        conds = self._conditioning(ctx)
        pinned = latent.pinned_frames(ctx)
        state = DenoiseState(
            run=ctx.run,
            model_key=self.definition.model_key,
            step_index=0,
            latents=latent.pack(noise if pinned is None else noise.clone()),  # fed noise is the caller's
            scheduler=scheduler,
            timesteps=timesteps,
            model_times=denoise.model_times(timesteps, ctx, dtype).to(ctx.device),
            phases=tuple(self._phases(timesteps, ctx)),
            rng=rng,
            noise_shape=noise_shape,
            num_branches=len(conds),
            cond={key: torch.cat([c[key] for c in conds]) for key in conds[0]},
            inline=ctx.execute_config.modulation == "inline",
            rows_per_forward=ctx.rows_per_forward,
            pinned=None if pinned is None else pinned.to(noise),
        )
        _prepare_phase(state)
        _impose_pinned(state)
        return state

    def _phases(self, timesteps: Tensor, ctx: GeneratorInferContext) -> Iterator[Phase]:
        """Runs of steps with the same network."""
        denoise, start = self.definition.denoise, 0

        def chosen(timestep: float) -> ModelKey:
            return denoise.select_network(timestep, ctx)

        for key, steps in groupby(timesteps.tolist(), chosen):
            stop = start + len(list(steps))
            guidance = Guidance("none")
            if ctx.negative is not None:
                guidance = Guidance("cfg", denoise.cfg_scale(key, ctx), ctx.skip_layers)
            yield Phase(ctx.networks[key], start, stop, guidance)
            start = stop

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

    def _conditioning(self, ctx: GeneratorInferContext) -> list[Cond]:
        """Conditioning of each branch, positive first."""
        positive = self.definition.text.conditioning(ctx.positive, ctx)
        if ctx.negative is None:
            return [positive]
        negative = self.definition.text.conditioning(ctx.negative, ctx)
        for key in positive:
            if positive[key].shape != negative[key].shape:
                raise InputError(
                    f"POSITIVE and NEGATIVE differ in {key}: {tuple(positive[key].shape)} and "
                    f"{tuple(negative[key].shape)}; with guidance they share a forward and must agree"
                )
        return [positive, negative]

    def step(self, states: Sequence[DenoiseState]) -> tuple[StepReport, ...]:
        """One denoising step of every state, in one forward for each network that they stand at.

        The states may stand at different steps and have different seeds and guidance values; their
        ``step_key`` must be equal. A prediction that is not finite raises before any state has moved.
        """
        started = time.perf_counter()
        denoise = self.definition.denoise
        assert states and all(s.steps_left for s in states), "a finished state was stepped"
        for state in states:
            if state.prepared is None or state.prepared.phase is not state.phase:
                _prepare_phase(state)
        if len({s.step_key() for s in states}) > 1:
            raise InputError("these requests cannot share a step: latent shape, text length or guidance kind differ")
        for state in states:
            _impose_pinned(state)
            denoise.before_step(state)
        predictions = _predict(states)
        for state, prediction in zip(states, predictions, strict=True):
            if not bool(torch.isfinite(prediction).all()):
                raise NonFiniteError(
                    f"denoise, step {state.step_index + 1} of {state.num_steps}: the network's output for "
                    f"{_not_finite(prediction.flatten(2).transpose(0, 1), state)} holds NaN or infinity; check the "
                    "weights, or use another dtype"
                )
        reports = []
        for state, prediction in zip(states, predictions, strict=True):
            velocity = denoise.guide(prediction, state.guidance)
            now = state.timesteps[state.step_index]
            state.latents = scheduler_step(state.scheduler, velocity, now, state.latents, state.rng)
            state.prediction = prediction
            state.step_index += 1
            denoise.after_step(state)
            reports.append(_report(state, time.perf_counter() - started))
        return tuple(reports)

    def finish(self, state: DenoiseState) -> Tensor:
        """The denoised latents [B, C, (F,) H, W]."""
        _impose_pinned(state)
        if not bool(torch.isfinite(state.latents).all()):
            raise NonFiniteError(
                f"denoise, end: the latents of {_not_finite(state.latents, state)} hold NaN or infinity; check the "
                "weights, or use another dtype"
            )
        return self.definition.latent.unpack(state.latents, state.noise_shape)

    def run(self, ctx: GeneratorInferContext, on_step: Callable[[StepReport], None] | None = None) -> Tensor:
        """``prepare``, every ``step``, ``finish``."""
        state = self.prepare(ctx)
        while state.steps_left:
            (report,) = self.step([state])
            if on_step is not None:
                on_step(report)
        return self.finish(state)


def _not_finite(by_sample: Tensor, state: DenoiseState) -> str:
    """The samples [B, ...] with a value that is not finite, as the caller knows them."""
    seeds = [
        str(rng.initial_seed()) for rng, sample in zip(state.rng, by_sample, strict=True) if not sample.isfinite().all()
    ]
    return f"the sample with seed {seeds[0]}" if len(seeds) == 1 else f"the samples with seeds {', '.join(seeds)}"


def _prepare_phase(state: DenoiseState) -> None:
    """Everything that no step of the state's next phase changes. Does nothing if no step is left."""
    if not state.steps_left:
        state.cond = None
        return
    phase, cond = state.phase, state.cond
    assert cond is not None, "the conditioning was dropped too early"
    state.prepared = None  # the last phase's tables go before this one's come
    static = prepare_static(phase.network, cond, state.noise_shape)
    times = state.model_times[phase.start : phase.stop]
    mod = None if state.inline else prepare_mod(phase.network, times, cond)
    state.prepared = Prepared(phase, static, mod, _branches(state.num_branches, state.num_samples, static, mod))
    if phase is state.phases[-1] and not state.inline:
        state.cond = None


def _branches(num_branches: int, num_samples: int, static: Static, mod: ModTable | None) -> tuple[Branch, ...]:
    return tuple(
        Branch(
            "negative" if i else "positive",
            static.narrow(i * num_samples, num_samples),
            None if mod is None else mod.narrow(i * num_samples, num_samples),
        )
        for i in range(num_branches)
    )


def _impose_pinned(state: DenoiseState) -> None:
    if state.pinned is not None:
        state.latents[:, :, : state.pinned.shape[2]] = state.pinned


def _predict(states: Sequence[DenoiseState]) -> list[Tensor]:
    """Each state's predictions [branches, B, ...]: two branches, and a third where layers are skipped in this step."""
    together: dict[Hashable, list[int]] = {}
    for i, state in enumerate(states):
        together.setdefault(state.batch_key(), []).append(i)
    found: dict[int, Tensor] = {}
    for group in together.values():
        found.update(zip(group, _predict_together([states[i] for i in group]), strict=True))
    return [found[i] for i in range(len(states))]


def _predict_together(states: Sequence[DenoiseState]) -> list[Tensor]:
    network = states[0].phase.network
    limits = [s.rows_per_forward for s in states if s.rows_per_forward is not None]
    most = min(limits, default=None)
    rows = _join_rows(states, network)
    output = predict(network, rows, max_rows=most)
    counts = [s.num_rows for s in states]
    found = [part.unflatten(0, (s.num_branches, -1)) for s, part in zip(states, output.split(counts), strict=True)]
    for i, state in enumerate(states):
        skip = state.guidance.skip_layers
        if skip is not None and skip.is_active(state.step_index, state.num_steps):
            positive = rows.narrow(sum(counts[:i]), state.num_samples)
            skipped = predict(network, positive, skip=skip.layers, max_rows=most)
            found[i] = torch.cat((found[i], skipped[None]))
    return found


def _join_rows(states: Sequence[DenoiseState], network: Network) -> Rows:
    latents = torch.cat([s.latents for s in states for _ in range(s.num_branches)]).to(network.dtype)
    per_state = [_mod_now(s) for s in states]
    mod = per_state[0] if len(states) == 1 else tuple(torch.cat(parts) for parts in zip(*per_state, strict=True))
    return Rows(latents, mod, Static.cat([s.current.static for s in states]), tuple(range(latents.shape[0])))


def _mod_now(state: DenoiseState) -> tuple[Tensor, ...]:
    prepared = state.current
    if prepared.mod is not None:
        return prepared.mod.at(state.step_index - prepared.phase.start)
    assert state.cond is not None
    now = state.model_times[state.step_index : state.step_index + 1]
    return prepare_mod(prepared.phase.network, now, state.cond).at(0)


def _initial_noise(
    ctx: GeneratorInferContext, shape: tuple[int, ...], rng: tuple[torch.Generator, ...], dtype: torch.dtype
) -> Tensor:
    """Drawn on the CPU, one generator per sample, as diffusers draws it."""
    if ctx.noise is not None:
        expected = (ctx.num_samples, *shape)
        if tuple(ctx.noise.shape) != expected:
            raise InputError(f"fed NOISE has shape {tuple(ctx.noise.shape)}, expected {expected}")
        return ctx.noise.to(dtype)
    return torch.cat([torch.randn((1, *shape), generator=g, dtype=dtype) for g in rng])


def _report(state: DenoiseState, seconds: float) -> StepReport:
    done = state.step_index - 1
    return StepReport(
        run=state.run,
        step_index=done,
        num_steps=state.num_steps,
        timestep=float(state.timesteps[done]),
        seconds=seconds,
    )
