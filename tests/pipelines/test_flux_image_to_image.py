"""FLUX.1 image to image, against diffusers and against itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from kdit import InputError, Pipeline, TensorKey
from kdit.pipelines.context_builders.flux import (
    FluxControlExtraInputs,
    FluxExtraInputs,
)
from kdit.pipelines.extra_inputs import MediaInputs
from tests.pipelines.flux_images import SIZE, difference, levels, make

ReferenceFamily = Callable[[str], Path]


def diffusers_latents(folder: Path, path: str, seeds: list[int], prompts: list[str], **call: object) -> Tensor:
    """Packed latents of each sample alone, each from its own generator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of diffusers and transformers, about themselves
        from diffusers import FluxImg2ImgPipeline

        pipe = FluxImg2ImgPipeline.from_pretrained(folder)
        pipe.set_progress_bar_config(disable=True)
        arguments = dict(image=Image.open(path), width=SIZE[0], height=SIZE[1], max_sequence_length=12)
        made = [
            pipe(prompt, generator=torch.Generator().manual_seed(seed), output_type="latent", **arguments, **call)[0]
            for seed, prompt in zip(seeds, prompts, strict=True)
        ]
    return torch.cat(made)


@pytest.mark.parametrize("strength", [0.3, 0.6, 1.0])
def test_an_image_is_changed_as_diffusers_changes_it(
    dev: Pipeline, dev_folder: Path, save: Callable[..., str], strength: float
) -> None:
    path, prompts = save("in.png", (50, 33)), ["a red fox", "two boats"]
    expected = diffusers_latents(
        dev_folder, path, [3, 4], prompts, strength=strength, num_inference_steps=7, guidance_scale=2.5
    )
    got = make(
        dev, FluxExtraInputs(image_path=path), prompt=prompts, steps=7, strength=strength, guidance_scale=2.5
    ).latents
    assert difference(got, expected) < 2e-6


def test_strength_decides_how_much_is_changed(dev: Pipeline, save: Callable[..., str]) -> None:
    """Also between two whole steps: 0 gives the input back, and above it there is at least one step."""
    extra = FluxExtraInputs(image_path=save("in.png", SIZE))
    source = np.asarray(Image.open(str(extra.image_path)))
    unchanged = make(dev, extra, strength=0)
    assert (levels(unchanged)[0] == source).all() and unchanged.settings["strength"] == 0
    assert "denoise" not in unchanged.timings
    least, usual, ignored = (make(dev, extra, steps=5, strength=s) for s in (0.01, None, 1))
    assert (least.settings["strength"], usual.settings["strength"]) == (0.01, 0.6)
    distances = [float((r.latents - unchanged.latents).norm()) for r in (least, usual, ignored)]
    assert 0 < distances[0] < distances[1] < distances[2]
    at_one = make(dev, FluxExtraInputs(image_path=save("other.png", SIZE, 9)), steps=5, strength=1)
    assert torch.equal(at_one.latents, ignored.latents)


def test_at_strength_0_the_input_comes_back_as_it_was_resized(dev: Pipeline, save: Callable[..., str]) -> None:
    path = save("in.png", (50, 33))
    resized = np.asarray(Image.open(path).resize(SIZE, Image.Resampling.LANCZOS))
    assert (levels(make(dev, FluxExtraInputs(image_path=path), strength=0, seed=0))[0] == resized).all()
    cut = make(dev, FluxExtraInputs(image_path=save("own.png", (44, 30))), strength=0, size=(44, 30), fit="crop")
    assert levels(cut).shape == (1, 30, 44, 3)


def test_strength_needs_an_image(dev: Pipeline) -> None:
    with pytest.raises(InputError, match=r"strength` is 0\.5, but there is no image to change"):
        make(dev, FluxExtraInputs(prompt_2="x"), strength=0.5)
    with pytest.raises(InputError, match="takes FluxExtraInputs, got FluxControlExtraInputs"):
        make(dev, FluxControlExtraInputs(control_path="x"))


def test_fed_latents_are_changed_like_an_image(dev: Pipeline, save: Callable[..., str]) -> None:
    """Nothing is drawn before the noise then, as in the reference: it is that of text to image."""
    extra = FluxExtraInputs(image_path=save("in.png", SIZE))
    image, drawn = make(dev, extra, strength=0).latents, torch.zeros(1, 4, 4, 6)
    fed = make(dev, None, strength=0.6, feeds={TensorKey.BASE_LATENT: image})
    noise = torch.randn(1, 4, 4, 6, generator=torch.Generator().manual_seed(fed.seeds[0]))
    again = make(dev, None, strength=0.6, feeds={TensorKey.BASE_LATENT: image, TensorKey.NOISE: noise})
    assert torch.equal(fed.latents, again.latents)
    whole = make(dev, None, strength=1.0, feeds={TensorKey.BASE_LATENT: image})
    assert torch.equal(whole.latents, make(dev, None).latents)
    with pytest.raises(InputError, match=r"BASE_LATENT is fed, so `extra_inputs\.image_path` would not be read"):
        make(dev, extra, strength=0.6, feeds={TensorKey.BASE_LATENT: image})
    with pytest.raises(InputError, match="without a strength only its shape is read"):
        make(dev, None, feeds={TensorKey.BASE_LATENT: image})
    with pytest.raises(InputError, match="POSTERIOR_NOISE is fed, but this request samples no posterior"):
        make(dev, None, feeds={TensorKey.POSTERIOR_NOISE: drawn})
    with pytest.raises(InputError, match="nothing reads START_IMG in this request"):
        make(dev, extra, feeds={TensorKey.START_IMG: torch.zeros(1, 8, 8, 3)})


def test_each_sample_can_be_made_again_alone(dev: Pipeline, save: Callable[..., str]) -> None:
    """With its own image, its own seed, its own draws."""
    paths = [save("a.png", (50, 33)), save("b.png", SIZE, 1)]
    both = make(dev, FluxExtraInputs(image_path=paths), prompt=["a red fox", "two boats"], strength=0.5)
    for i, (prompt, path) in enumerate(zip(["a red fox", "two boats"], paths, strict=True)):
        alone = make(dev, FluxExtraInputs(image_path=path), prompt=prompt, strength=0.5, seed=3 + i)
        assert difference(both.latents[i : i + 1], alone.latents) < 1e-6
    with pytest.raises(InputError, match="image_path` has 2 entries for 1 prompts"):
        make(dev, FluxExtraInputs(image_path=paths))


def test_zero_is_a_value(dev: Pipeline, save: Callable[..., str]) -> None:
    """Seed, guidance and strength 0 are not "not given"."""
    extra = FluxExtraInputs(image_path=save("in.png", SIZE))
    first, again = (make(dev, extra, seed=0, guidance_scale=0, strength=0.5) for _ in range(2))
    assert torch.equal(first.latents, again.latents) and first.seeds == (0,)
    assert first.settings["guidance_scale"] == 0
    assert difference(make(dev, extra, seed=0, strength=0.5).latents, first.latents) > 1e-3


@pytest.mark.parametrize("steps", [1, 2, 4, 8, 1000])
@pytest.mark.parametrize("shifted", [True, False])
def test_the_schedule_is_that_of_diffusers(dev: Pipeline, schnell: Pipeline, steps: int, shifted: bool) -> None:
    """Sigmas fall strictly from 1 to 0, and are the same when they are set again."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps

    from kdit.generators.generator_runner import GeneratorRunner
    from kdit.generators.registry import generator_def

    pipe = dev if shifted else schnell
    config = pipe.checkpoint.scheduler_config()
    expected = FlowMatchEulerDiscreteScheduler.from_config(dict(config))
    keys = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    mu = calculate_shift(4 * 6, *(expected.config[key] for key in keys))
    retrieve_timesteps(expected, steps, "cpu", sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    got = GeneratorRunner(generator_def(pipe.family.network)).schedule(config, steps, (4, 8, 12))
    sigmas: Tensor = got.sigmas  # type: ignore[attr-defined]
    assert torch.equal(sigmas, expected.sigmas) and torch.equal(got.timesteps, expected.timesteps)
    assert sigmas[0] == 1 and sigmas[-1] == 0 and bool((sigmas.diff() < 0).all())
    generator_def(pipe.family.network).denoise.set_timesteps(got, steps, (4, 8, 12))
    assert torch.equal(got.sigmas, expected.sigmas)  # type: ignore[attr-defined]


def test_the_image_decides_the_size_where_none_is_given(dev: Pipeline, save: Callable[..., str]) -> None:
    """At the size beside it that changes its shape least; what is asked for is made exactly or refused."""
    extra = FluxExtraInputs(image_path=save("in.png", (120, 68)))
    assert make(dev, extra, size=None, steps=1).settings["size"] == [112, 64]
    with pytest.raises(InputError, match=r"`size` 120x68: .* multiples of 16; nearest: 128x64"):
        make(dev, extra, size=(120, 68))
    fitted = make(dev, extra, size=(120, 68), fit="crop", steps=1)
    assert levels(fitted).shape == (1, 68, 120, 3) and fitted.settings["size"] == [120, 68]


def test_files_of_a_command_line(dev: Pipeline) -> None:
    one, two = MediaInputs(images=("a.png",)), MediaInputs(images=("a.png", "b.png"))
    assert dev.family.take_media(one) == FluxExtraInputs(image_path="a.png")
    assert dev.family.take_media(two) == FluxExtraInputs(image_path=["a.png", "b.png"])
    with pytest.raises(InputError, match=r"FLUX\.1 takes no `mask`; it takes `images`"):
        dev.family.take_media(MediaInputs(images=("a.png",), mask="m.png"))
