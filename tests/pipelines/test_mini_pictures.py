"""The built-in model draws what it is asked for, and draws what diffusers draws with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline

from kdit import Pipeline, RuntimeConfig, SampleConfig
from tests.models.fill import distance

pytestmark = pytest.mark.slow
EIGHT_STEPS = SampleConfig(steps=8)


@pytest.fixture(scope="module")
def mini() -> Iterator[Pipeline]:
    with Pipeline.from_models("mini") as pipe:
        yield pipe


def test_prompts_give_the_pictures_they_name(mini: Pipeline) -> None:
    result = mini.generate(["a red heart", "panda"], sample_config=EIGHT_STEPS, runtime_config=RuntimeConfig(seed=0))
    assert [image.size for image in result.images] == [(128, 128), (128, 128)]
    assert result.pixels is not None
    heart, panda = result.pixels
    for picture in (heart, panda):  # on white
        assert picture[:6, :6].mean() > 0.95
    red, green, blue = heart[48:80, 48:80].mean((0, 1))
    assert red > 0.8 and green < 0.4 and blue < 0.4
    assert heart[:40, 60:68].mean() > heart[60:90, 60:68].mean() + 0.2  # the notch between its lobes is light
    assert (panda.amax(-1) - panda.amin(-1)).mean() < 0.1  # black and white
    assert panda.amin() < 0.3 and (panda.mean(-1) < 0.5).float().mean() > 0.05


def test_the_same_seed_gives_the_picture_of_diffusers(mini: Pipeline, mini_dir: Path) -> None:
    reference = FluxPipeline.from_pretrained(str(mini_dir), dtype=torch.float32)
    reference.set_progress_bar_config(disable=True)
    expected = reference(
        "pizza slice",
        negative_prompt="",
        true_cfg_scale=3.5,
        num_inference_steps=8,
        height=128,
        width=128,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(5),
        output_type="latent",
    ).images
    got = mini.generate("pizza slice", sample_config=EIGHT_STEPS, runtime_config=RuntimeConfig(seed=5))
    assert got.latents.shape == expected.shape
    assert distance(got.latents, expected) < 1e-4
