"""Wan's handlers: which expert runs, times of given frames, what BASE_LATENT and AUX_LATENT may hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from kdit.config import ExecuteConfig, SampleConfig
from kdit.errors import InputError
from kdit.generators.denoise_state import DenoiseState
from kdit.generators.generator_context import AuxLatent, BaseLatent, GeneratorInferContext
from kdit.generators.generator_runner import GeneratorRunner
from kdit.generators.registry import generator_def
from kdit.keys import ModelKey, RunId
from kdit.models.wan.network import WanNetwork
from kdit.ops.opset import OpSet
from tests.models.fill import distance, randomise

HIGH, LOW = ModelKey.Wan2_2_T2V_14B, ModelKey.Wan2_2_T2V_14B_LOW
UNIPC: dict[str, object] = {
    "_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
}
SHAPE = (4, 3, 4, 6)


def network(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> WanNetwork:
    config = dict(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=10,
        freq_dim=16,
        ffn_dim=20,
        num_layers=1,
        rope_max_seq_len=16,
    )
    built = WanNetwork.from_config({**config, **changes}, ops=OpSet())
    return randomise(built, seed).to(dtype).requires_grad_(False)


def context(*networks: tuple[ModelKey, WanNetwork], **changes: Any) -> GeneratorInferContext:
    generator = torch.Generator().manual_seed(5)
    base = GeneratorInferContext(
        run=RunId("test"),
        networks=dict(networks),
        positive=[torch.randn(1, 7, 10, generator=generator)],
        negative=[torch.randn(1, 7, 10, generator=generator)],
        base_latent=BaseLatent(torch.zeros(1, *SHAPE)),
        aux_latent=None,
        vace_context=None,
        noise=None,
        seeds=(1,),
        sample_config=SampleConfig(steps=4, cfg_scale=4.0, cfg_scale_2=3.0, max_sequence_length=7),
        execute_config=ExecuteConfig(),
        scheduler_config=UNIPC,
        device=torch.device("cpu"),
        expert_boundary=875.0,
    )
    return replace(base, **changes)


def experts(**changes: Any) -> GeneratorInferContext:
    return context((HIGH, network(1)), (LOW, network(2)), **changes)


RUNNER = GeneratorRunner(generator_def(HIGH))


@pytest.mark.parametrize("steps", [1, 2, 4, 40])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.875, 0.9, 0.999, 1.0])
def test_the_first_expert_runs_down_to_the_boundary(ratio: float, steps: int) -> None:
    boundary = ratio * 1000
    sample = SampleConfig(steps=steps, cfg_scale=4.0, cfg_scale_2=3.0, max_sequence_length=7)
    ctx = experts(expert_boundary=boundary, sample_config=sample)
    state = RUNNER.prepare(ctx)
    times = state.timesteps.tolist()
    assert len(times) == steps
    per_step = {i: phase for phase in state.phases for i in range(phase.start, phase.stop)}
    assert list(per_step) == list(range(steps))  # every step once, in order
    for i, time in enumerate(times):
        key = HIGH if time >= boundary else LOW
        assert per_step[i].network is ctx.networks[key]
        assert per_step[i].guidance.scale == (4.0 if key is HIGH else 3.0)
    used = {id(phase.network) for phase in state.phases}
    expected = {0.0: {HIGH}, 0.999: {HIGH, LOW} if steps > 1 else {HIGH}, 1.0: {LOW}}.get(ratio)
    if expected is not None:  # either may get no step
        assert used == {id(ctx.networks[key]) for key in expected}
    assert bool(torch.isfinite(RUNNER.run(ctx)).all())


def test_a_timestep_on_the_boundary_is_the_first_experts() -> None:
    denoise = RUNNER.definition.denoise
    ctx = experts(expert_boundary=900.0)
    assert [denoise.select_network(t, ctx) for t in (901.0, 900.0, 899.0)] == [HIGH, HIGH, LOW]


def test_the_second_expert_has_the_first_ones_scale_unless_one_is_given() -> None:
    sample = SampleConfig(steps=4, cfg_scale=4.0, max_sequence_length=7)
    assert {p.guidance.scale for p in RUNNER.prepare(experts(sample_config=sample)).phases} == {4.0}


def step_all(states: list[DenoiseState]) -> None:
    while any(state.steps_left for state in states):
        RUNNER.step([state for state in states if state.steps_left])


def test_requests_in_phases_of_different_experts_share_steps() -> None:
    high, low = network(1), network(2)

    def request(steps: int, seed: int) -> GeneratorInferContext:
        sample = SampleConfig(steps=steps, cfg_scale=4.0, cfg_scale_2=3.0, max_sequence_length=7)
        return context((HIGH, high), (LOW, low), sample_config=sample, seeds=(seed,))

    requests = [request(6, 1), request(4, 2), request(3, 3)]
    alone = [RUNNER.run(ctx) for ctx in requests]
    first, second, third = (RUNNER.prepare(ctx) for ctx in requests)
    RUNNER.step([first])
    RUNNER.step([first])
    RUNNER.step([first, second])
    assert first.phase.network is not second.phase.network
    assert first.batch_key() != second.batch_key() and first.step_key() == second.step_key()
    step_all([second, first, third])
    for state, expected in zip((first, second, third), alone, strict=True):
        assert distance(RUNNER.finish(state), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_latents_stay_in_float32_whatever_the_network_computes_in(dtype: torch.dtype) -> None:
    ctx = context((ModelKey.Wan2_1_T2V, network(1, dtype)), expert_boundary=None)
    runner = GeneratorRunner(generator_def(ModelKey.Wan2_1_T2V))
    state = runner.prepare(ctx)
    assert state.latents.dtype == torch.float32
    assert torch.equal(state.latents, torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(1)))
    runner.step([state])
    assert state.latents.dtype == torch.float32 and state.prediction is not None and state.prediction.dtype == dtype


def test_timesteps_are_those_of_the_scheduler_and_whole_numbers() -> None:
    state = RUNNER.prepare(experts())
    judge = diffusers.UniPCMultistepScheduler.from_config(UNIPC)
    judge.set_timesteps(4)
    assert torch.equal(state.model_times, judge.timesteps) and state.model_times.dtype == torch.int64


@pytest.mark.parametrize("steps", [1, 2, 4, 8, 1000])
@pytest.mark.parametrize("shift", [3.0, 5.0])
def test_the_schedule_is_that_of_diffusers(shift: float, steps: int) -> None:
    """Sigmas fall strictly to 0, and are the same when they are set again: the shift acts once."""
    config = UNIPC | {"flow_shift": shift}
    judge = diffusers.UniPCMultistepScheduler.from_config(config)
    judge.set_timesteps(steps)
    scheduler: Any = RUNNER.schedule(config, steps, SHAPE)
    assert torch.equal(scheduler.sigmas, judge.sigmas) and torch.equal(scheduler.timesteps, judge.timesteps)
    assert scheduler.sigmas[0] == pytest.approx(1, abs=1e-5) and scheduler.sigmas[-1] == 0
    assert bool((scheduler.sigmas.diff() < 0).all())
    RUNNER.definition.denoise.set_timesteps(scheduler, steps, SHAPE)
    assert torch.equal(scheduler.sigmas, judge.sigmas)


PINNED = generator_def(ModelKey.Wan2_2_TI2V_5B)


def pinned_context(latent: Tensor, mask: Tensor | None = None) -> GeneratorInferContext:
    return context((ModelKey.Wan2_2_TI2V_5B, network(1)), base_latent=BaseLatent(latent, mask), expert_boundary=None)


def first_frame(shape: tuple[int, ...] = SHAPE) -> Tensor:
    latent = torch.zeros(1, *shape)
    latent[:, :, 0] = torch.randn(1, shape[0], *shape[2:], generator=torch.Generator().manual_seed(8))
    return latent


def test_a_given_first_frame_stands_at_time_0_and_in_the_latents() -> None:
    runner, latent = GeneratorRunner(PINNED), first_frame()
    state = runner.prepare(pinned_context(latent))
    assert state.model_times.shape == (4, 2)  # two times, never one per token
    assert state.model_times[:, 0].tolist() == [0, 0, 0, 0] and torch.equal(state.model_times[:, 1], state.timesteps)
    assert state.current.mod is not None and state.current.mod.rows[0].shape[2] == 2 * 6
    assert torch.equal(state.latents[:, :, 0], latent[:, :, 0])
    while state.steps_left:
        runner.step([state])
    result = runner.finish(state)
    assert torch.equal(result[:, :, 0], latent[:, :, 0])
    plain = runner.run(pinned_context(torch.zeros(1, *SHAPE)))
    assert distance(result[:, :, 1:], plain[:, :, 1:]) > 1e-3


def test_without_a_first_frame_there_is_one_time() -> None:
    state = GeneratorRunner(PINNED).prepare(pinned_context(torch.zeros(1, *SHAPE)))
    assert state.model_times.shape == (4,) and state.pinned is None


def test_a_video_of_the_given_frame_alone_is_that_frame() -> None:
    latent = first_frame((4, 1, 4, 6))
    runner = GeneratorRunner(PINNED)
    state = runner.prepare(pinned_context(latent))
    assert state.model_times.tolist() == [0, 0, 0, 0]
    assert torch.equal(runner.run(pinned_context(latent)), latent)


def test_frames_that_would_not_be_read_are_refused() -> None:
    late = torch.zeros(1, *SHAPE)
    late[:, :, 1] = 1.0
    runner = GeneratorRunner(PINNED)
    with pytest.raises(InputError, match="frames after the first"):
        runner.prepare(pinned_context(late))
    with pytest.raises(InputError, match="the mask of BASE_LATENT has shape"):
        runner.prepare(pinned_context(first_frame(), torch.ones(1, 4, 3, 4, 6)))
    with pytest.raises(InputError, match="makes videos of text alone"):
        RUNNER.prepare(experts(base_latent=BaseLatent(first_frame())))
    with pytest.raises(InputError, match=r"is \[B, 4, F, H, W\], got \(1, 5, 3, 4, 6\)"):
        RUNNER.prepare(experts(base_latent=BaseLatent(torch.zeros(1, 5, 3, 4, 6))))


FRAMES = generator_def(ModelKey.Wan2_1_I2V)
READS_FRAMES = dict(in_channels=4 + 4 + 2, image_dim=6, added_kv_proj_dim=24)


def frames_context(**changes: Any) -> GeneratorInferContext:
    settings = {"aux_latent": AuxLatent(torch.ones(1, 3, 6)), "expert_boundary": None, **changes}
    return context((ModelKey.Wan2_1_I2V, network(1, **READS_FRAMES)), **settings)


def test_frames_without_a_mask_are_a_first_frame() -> None:
    ctx = frames_context(base_latent=BaseLatent(torch.full((1, *SHAPE), 0.5)))
    read = replace(ctx, base_latent=FRAMES.latent.preprocess_base_latent(ctx.base_latent, ctx))
    cond = FRAMES.text.conditioning(ctx.positive, read)
    assert cond["frames"].shape == (1, 2 + 4, 3, 4, 6) and bool((cond["frames"][:, 2:] == 0.5).all())
    assert cond["frames"][:, :2].sum(dim=(0, 1, 3, 4)).tolist() == [2 * 24, 0, 0]
    assert torch.equal(cond["image"], torch.ones(1, 3, 6))


def test_the_mask_and_the_image_tokens_must_have_the_models_shape() -> None:
    runner = GeneratorRunner(FRAMES)
    with pytest.raises(
        InputError, match=r"mask of BASE_LATENT has shape \(1, 3, 3, 4, 6\), expected \(1, 2, 3, 4, 6\)"
    ):
        runner.prepare(frames_context(base_latent=BaseLatent(first_frame(), torch.ones(1, 3, 3, 4, 6))))
    for aux in (
        None,
        AuxLatent(torch.ones(2, 3, 6)),
        AuxLatent(torch.ones(1, 3, 5)),
        AuxLatent([torch.ones(1, 3, 6)] * 2),
    ):
        with pytest.raises(InputError, match=r"AUX_LATENT of this Wan model is one tensor \[1, tokens, 6\]"):
            runner.prepare(frames_context(aux_latent=aux))
    without = network(1, in_channels=10)
    with pytest.raises(InputError, match="reads no tokens of an image encoder"):
        runner.prepare(
            context((ModelKey.Wan2_1_I2V, without), aux_latent=AuxLatent(torch.ones(1, 3, 6)), expert_boundary=None)
        )
    with pytest.raises(InputError, match="Wan takes no AUX_LATENT"):
        RUNNER.prepare(experts(aux_latent=AuxLatent(torch.ones(1, 3, 6))))


def test_text_of_another_form_is_refused() -> None:
    for wrong in ([torch.zeros(1, 7, 9)], [torch.zeros(1, 10)], [torch.zeros(1, 7, 10)] * 2):
        with pytest.raises(InputError, match=r"Wan text is \[UMT5 states \[B, L, 10\]\]"):
            RUNNER.prepare(experts(positive=wrong, negative=None))
