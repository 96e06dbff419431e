"""SD3 against diffusers where no recorded case is: image to image, and a checkpoint without T5."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from kdit import Pipeline, RuntimeConfig, SampleConfig
from kdit.pipelines.context_builders.sd3 import SD3ExtraInputs
from tests.models.fill import distance
from tests.pipelines.sd3_images import picture
from tests.pipelines.small import damaged

PROMPTS = ["a red fox", "two small boats"]
SIZE = (96, 80)


def reference(class_name: str, folder: Path, **components: None) -> Any:
    """diffusers' own pipeline over the same checkpoint."""
    import diffusers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of diffusers and transformers, about themselves
        pipe = getattr(diffusers, class_name).from_pretrained(folder, **components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def recorded(pipe: Any, **call: Any) -> torch.Tensor:
    """Final latents of two samples with seeds 5 and 6."""
    rng = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    size = dict(width=SIZE[0], height=SIZE[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        latents: torch.Tensor = pipe(
            PROMPTS, generator=rng, output_type="latent", max_sequence_length=20, guidance_scale=4.0, **size, **call
        ).images
    return latents


@pytest.fixture(scope="module")
def folder(reference_family: Callable[[str], Path]) -> Path:
    return reference_family("sd35_medium") / "model"


@pytest.mark.slow
def test_image_to_image_equals_diffusers(folder: Path, tmp_path: Path) -> None:
    pipe, judge = Pipeline.from_models(folder), reference("StableDiffusion3Img2ImgPipeline", folder)
    paths = [picture(tmp_path / f"{i}.png", SIZE, i) for i in range(2)]
    images = [Image.open(path) for path in paths]
    results = []
    for strength in (0.1, 0.2, 0.3, 0.6, 1.0):
        expected = recorded(judge, image=images, strength=strength, num_inference_steps=5)
        result = pipe.generate(
            PROMPTS,
            sample_config=SampleConfig(steps=5, cfg_scale=4.0, strength=strength, max_sequence_length=20),
            runtime_config=RuntimeConfig(seed=5, size=SIZE),
            extra_inputs=SD3ExtraInputs(image_path=paths),
        )
        results.append(result.latents)
        assert distance(result.latents, expected) < 1e-5, strength
        assert result.settings["strength"] == strength
    assert torch.equal(results[0], results[1])  # whole steps, one at least
    assert all(distance(a, b) > 1e-2 for a, b in pairwise(results[1:]))


@pytest.mark.slow
def test_without_t5_equals_diffusers(folder: Path, tmp_path: Path) -> None:
    absent = {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    model = damaged(folder, tmp_path, "model_index.json", **absent)
    expected = recorded(
        reference("StableDiffusion3Pipeline", folder, text_encoder_3=None, tokenizer_3=None), num_inference_steps=3
    )
    result = Pipeline.from_models(model).generate(
        PROMPTS,
        sample_config=SampleConfig(steps=3, cfg_scale=4.0, max_sequence_length=20),
        runtime_config=RuntimeConfig(seed=5, size=SIZE),
    )
    assert distance(result.latents, expected) < 1e-5
