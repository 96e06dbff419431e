"""SD3's handlers: conditioning from encoder outputs, latents, schedules."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kdit.config import ExecuteConfig, SampleConfig
from kdit.errors import InputError
from kdit.generators.generator_context import BaseLatent, GeneratorInferContext
from kdit.generators.generator_runner import GeneratorRunner
from kdit.generators.registry import generator_def
from kdit.keys import ModelKey, RunId
from kdit.models.sd3.network import SD3Network
from kdit.ops.opset import OpSet

CONFIG: dict[str, Any] = dict(
    in_channels=4,
    out_channels=4,
    num_layers=1,
    attention_head_dim=8,
    num_attention_heads=2,
    joint_attention_dim=12,
    caption_projection_dim=16,
    pooled_projection_dim=9,
    pos_embed_max_size=8,
)
SCHEDULER: dict[str, object] = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
DYNAMIC: dict[str, object] = {**SCHEDULER, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
DEFINITION = generator_def(ModelKey.SD3)
RUNNER = GeneratorRunner(DEFINITION)
CLIP = [torch.full((2, 3, 4), 1.0), torch.full((2, 4), 2.0), torch.full((2, 3, 5), 3.0), torch.full((2, 5), 4.0)]


def context(strength: float | None = None) -> GeneratorInferContext:
    return GeneratorInferContext(
        run=RunId("test"),
        networks={ModelKey.SD3: SD3Network.from_config(CONFIG, ops=OpSet())},
        positive=CLIP,
        negative=None,
        base_latent=BaseLatent(torch.zeros(2, 4, 6, 8)),
        aux_latent=None,
        vace_context=None,
        noise=None,
        seeds=(1, 2),
        sample_config=SampleConfig(steps=3, cfg_scale=1.0, max_sequence_length=6, strength=strength),
        execute_config=ExecuteConfig(),
        scheduler_config=SCHEDULER,
        device=torch.device("cpu"),
    )


def test_clip_tokens_are_widened_with_zeros_and_come_before_t5() -> None:
    cond = DEFINITION.text.conditioning([*CLIP, torch.full((2, 6, 12), 5.0)], context())
    assert cond["txt"].shape == (2, 3 + 6, 12)
    assert cond["txt"][1, 2].tolist() == [1.0] * 4 + [3.0] * 5 + [0.0] * 3
    assert cond["txt"][0, 3:].unique().tolist() == [5.0]
    assert cond["pooled"].tolist() == [[2.0] * 4 + [4.0] * 5] * 2


def test_without_t5_zeros_stand_in_its_place() -> None:
    cond = DEFINITION.text.conditioning(CLIP, context())
    with_zeros = DEFINITION.text.conditioning([*CLIP, torch.zeros(2, 6, 12)], context())
    assert torch.equal(cond["txt"], with_zeros["txt"])


def test_text_can_come_joined() -> None:
    joined = [torch.rand(2, 9, 12), torch.rand(2, 9)]
    cond = DEFINITION.text.conditioning(joined, context())
    assert torch.equal(cond["txt"], joined[0]) and torch.equal(cond["pooled"], joined[1])


@pytest.mark.parametrize(
    "encoded",
    [
        [torch.zeros(2, 9, 12)],
        [torch.zeros(2, 9, 11), torch.zeros(2, 9)],
        [torch.zeros(2, 9, 12), torch.zeros(2, 8)],
        [torch.zeros(2, 9, 12), torch.zeros(2, 1, 9)],
        CLIP[:3],
        [CLIP[1], CLIP[0], CLIP[3], CLIP[2]],
        [torch.zeros(2, 3, 9), CLIP[1], CLIP[2], CLIP[3]],  # wider than T5
        [*CLIP, torch.zeros(2, 6, 13)],
    ],
)
def test_text_of_another_form_is_refused_with_what_is_expected(encoded: list[Tensor]) -> None:
    with pytest.raises(InputError, match=r"SD3 text is \[states \[B, L, 12\], pooled \[B, 9\]\].*got shapes \(2, "):
        DEFINITION.text.conditioning(encoded, context())


def test_latents_of_an_image_need_a_strength() -> None:
    image = BaseLatent(torch.ones(2, 4, 6, 8))
    assert DEFINITION.latent.preprocess_base_latent(image, context(0.5)) is image
    with pytest.raises(InputError, match="BASE_LATENT holds an image, but without a strength"):
        DEFINITION.latent.preprocess_base_latent(image, context())


# Shift 3 acts twice on the ends, as in the reference: 0.003 is 3 * 0.001 / (1 + 2 * 0.001), shifted once more 0.0089.
GOLDEN = {
    1: [1.0],
    2: [1.0, 0.00892857],
    4: [1.0, 0.85769230, 0.60215056, 0.00892857],
}


@pytest.mark.parametrize("steps", [1, 2, 4, 8, 28, 1000])
def test_sigmas_fall_from_1_to_0(steps: int) -> None:
    scheduler: Any = RUNNER.schedule(SCHEDULER, steps, (4, 6, 8))
    sigmas = scheduler.sigmas.tolist()
    assert len(sigmas) == steps + 1 and (sigmas[0], sigmas[-1]) == (1.0, 0.0)
    assert all(a > b for a, b in pairwise(sigmas))
    assert torch.equal(scheduler.timesteps, scheduler.sigmas[:-1] * 1000)
    first = np.linspace(1.0, 3 * 0.001 / 1.002, steps) if steps > 1 else np.ones(1)
    assert sigmas[:-1] == pytest.approx((3 * first / (1 + 2 * first)).tolist(), abs=1e-6)
    if steps in GOLDEN:
        assert sigmas[:-1] == pytest.approx(GOLDEN[steps], abs=1e-6)
    DEFINITION.denoise.set_timesteps(scheduler, steps, (4, 6, 8))
    assert scheduler.sigmas.tolist() == sigmas  # a second time changes nothing


@pytest.mark.parametrize("steps", [1, 2, 4, 28])
def test_dynamic_shift_follows_the_number_of_tokens(steps: int) -> None:
    def sigmas(height: int, width: int) -> list[float]:
        scheduler: Any = RUNNER.schedule(DYNAMIC, steps, (4, height, width))
        return list(map(float, scheduler.sigmas[:-1]))

    first = np.linspace(1.0, 0.001, steps) if steps > 1 else np.ones(1)
    for (height, width), mu in (((32, 32), 0.5), ((128, 128), 1.15), ((64, 128), 0.5 + 0.65 * 1792 / 3840)):
        shift = np.exp(mu)
        assert sigmas(height, width) == pytest.approx((shift / (shift + 1 / first - 1)).tolist(), abs=1e-5)


def test_times_reach_the_network_unrounded() -> None:
    times = torch.tensor([857.748, 0.5])
    assert torch.equal(DEFINITION.denoise.model_times(times, context(), torch.bfloat16), times)
