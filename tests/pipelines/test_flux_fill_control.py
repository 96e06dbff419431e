"""FLUX.1 Fill and Control, against diffusers and against themselves."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kdit import InputError, Pipeline, RuntimeConfig, SampleConfig, TensorKey
from kdit.errors import UnsupportedOptionError
from kdit.pipelines.context_builders.flux import (
    FluxControlExtraInputs,
    FluxFillExtraInputs,
)
from kdit.pipelines.extra_inputs import MediaInputs
from tests.pipelines.flux_images import SIZE, difference, levels, make

ReferenceFamily = Callable[[str], Path]


@pytest.fixture(scope="module")
def fill(reference_family: ReferenceFamily) -> Pipeline:
    return Pipeline.from_models(reference_family("flux_fill") / "model")


@pytest.fixture(scope="module")
def control(reference_family: ReferenceFamily) -> Pipeline:
    return Pipeline.from_models(reference_family("flux_control") / "model")


# ---- Fill


def hole(width: int, height: int) -> np.ndarray:
    """White in the middle, a grey rim, black outside."""
    mask = np.zeros((height, width), np.uint8)
    mask[height // 4 : -height // 4, width // 4 : -width // 4] = 100
    mask[height // 3 : -height // 3, width // 3 : -width // 3] = 255
    return mask


def test_what_the_mask_leaves_black_is_kept_if_asked_for(fill: Pipeline, save: Callable[..., str]) -> None:
    path, mask = save("in.png", SIZE), hole(*SIZE)
    inputs = dict(image_path=path, mask_path=save("mask.png", mask))
    made, kept = (levels(make(fill, FluxFillExtraInputs(**inputs, composite=on)))[0] for on in (False, True))
    source = np.asarray(Image.open(path))
    assert (kept[mask == 0] == source[mask == 0]).all() and (made[mask == 0] != source[mask == 0]).any()
    assert (kept[mask == 255] == made[mask == 255]).all()
    grey = mask == 100
    blended = source[grey] * (1 - 100 / 255) + made[grey] * (100 / 255)
    assert np.abs(kept[grey] - blended).max() < 1.01
    black = {**inputs, "mask_path": save("black.png", np.zeros((20, 20), np.uint8))}
    assert (levels(make(fill, FluxFillExtraInputs(**black, composite=True)))[0] == source).all()


def test_greys_of_a_mask_reach_the_network_if_asked_for(fill: Pipeline, save: Callable[..., str]) -> None:
    inputs = dict(image_path=save("in.png", SIZE), mask_path=save("soft.png", hole(*SIZE)))
    hard = np.where(hole(*SIZE) >= 128, 255, 0).astype(np.uint8)
    binary, soft = (make(fill, FluxFillExtraInputs(**inputs, mask_binarize=on)).latents for on in (True, False))
    same = make(fill, FluxFillExtraInputs(**{**inputs, "mask_path": save("hard.png", hard)})).latents
    assert torch.equal(binary, same) and difference(soft, binary) > 1e-3


def test_fill_begins_at_the_image_below_strength_1(
    fill: Pipeline, reference_family: ReferenceFamily, save: Callable[..., str]
) -> None:
    image, mask = save("in.png", (50, 33)), save("mask.png", hole(70, 40))
    got = [
        make(fill, FluxFillExtraInputs(image_path=image, mask_path=mask), steps=4, strength=s, guidance_scale=9).latents
        for s in (0.5, 1, None)
    ]
    assert torch.equal(got[1], got[2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of diffusers and transformers, about themselves
        from diffusers import FluxFillPipeline

        pipe = FluxFillPipeline.from_pretrained(reference_family("flux_fill") / "model")
        pipe.set_progress_bar_config(disable=True)
        for strength, latents in zip((0.5, 1.0), got[:2], strict=True):
            expected = pipe(
                "a red fox",
                image=Image.open(image),
                mask_image=Image.open(mask),
                width=SIZE[0],
                height=SIZE[1],
                strength=strength,
                num_inference_steps=4,
                guidance_scale=9,
                max_sequence_length=12,
                generator=torch.Generator().manual_seed(3),
                output_type="latent",
            )[0]
            assert difference(latents, expected) < 2e-6
    unchanged = levels(make(fill, FluxFillExtraInputs(image_path=image, mask_path=mask), strength=0))[0]
    assert (unchanged == np.asarray(Image.open(image).resize(SIZE, Image.Resampling.LANCZOS))).all()


def test_fill_samples_can_be_made_again_alone(fill: Pipeline, save: Callable[..., str]) -> None:
    images, mask = [save("a.png", (50, 33)), save("b.png", SIZE, 1)], save("mask.png", hole(70, 40))
    both = make(fill, FluxFillExtraInputs(image_path=images, mask_path=mask), prompt=["a", "b"]).latents
    alone = make(fill, FluxFillExtraInputs(image_path=images[1], mask_path=mask), prompt="b", seed=4).latents
    assert difference(both[1:], alone) < 1e-6


def test_what_fill_needs_is_named(fill: Pipeline, save: Callable[..., str]) -> None:
    path = save("in.png", SIZE)
    for extra in (None, FluxFillExtraInputs(mask_path=path)):
        with pytest.raises(InputError, match=r"give `FluxFillExtraInputs\.image_path`"):
            make(fill, extra)
    with pytest.raises(InputError, match=r"give `FluxFillExtraInputs\.mask_path`"):
        make(fill, FluxFillExtraInputs(image_path=path))
    both = FluxFillExtraInputs(image_path=path, mask_path=path)
    with pytest.raises(InputError, match="two posteriors are sampled"):
        make(fill, both, strength=0.5, feeds={TensorKey.POSTERIOR_NOISE: torch.zeros(1, 4, 4, 6)})
    with pytest.raises(InputError, match=r"MASK is fed, so `extra_inputs\.mask_path` would not be read"):
        make(fill, both, feeds={TensorKey.MASK: torch.zeros(1, 4, 4, 1)})
    told = r"AUX_LATENT is fed, so `extra_inputs\.image_path` or `extra_inputs\.mask_path` would not be read"
    with pytest.raises(InputError, match=told):
        make(fill, both, feeds={TensorKey.AUX_LATENT: torch.zeros(1, 68, 4, 6)})


def test_a_mask_and_latents_can_be_fed(fill: Pipeline, save: Callable[..., str]) -> None:
    """Which leaves the noise as it is with files."""
    image, mask = save("in.png", SIZE), hole(*SIZE)
    files = FluxFillExtraInputs(image_path=image, mask_path=save("mask.png", mask), composite=True)
    expected = make(fill, files)
    tensor = torch.from_numpy(mask)[None, ..., None] / 255
    with_mask = make(fill, FluxFillExtraInputs(image_path=image, composite=True), feeds={TensorKey.MASK: tensor})
    assert torch.equal(with_mask.latents, expected.latents) and (levels(with_mask) == levels(expected)).all()
    request = fill.request(
        "a red fox",
        sample_config=SampleConfig(steps=2, max_sequence_length=12),
        runtime_config=RuntimeConfig(seed=3, size=SIZE),
        extra_inputs=files,
    )
    with fill.begin(request, hold=(TensorKey.AUX_LATENT,)) as run:
        aux = run.fetch(TensorKey.AUX_LATENT)
    assert torch.equal(make(fill, None, feeds={TensorKey.AUX_LATENT: aux}).latents, expected.latents)


def test_files_of_a_command_line_for_fill(fill: Pipeline) -> None:
    masked = MediaInputs(images=("a.png",), mask="m.png")
    assert fill.family.take_media(masked) == FluxFillExtraInputs(image_path="a.png", mask_path="m.png")


# ---- Control


def test_a_control_image_of_another_size_is_scaled(control: Pipeline, save: Callable[..., str]) -> None:
    path = save("in.png", (50, 33))
    resized = save("resized.png", np.asarray(Image.open(path).resize(SIZE, Image.Resampling.LANCZOS)))
    latents = [make(control, FluxControlExtraInputs(control_path=p)).latents for p in (path, resized)]
    assert torch.equal(*latents)
    other = make(control, FluxControlExtraInputs(control_path=save("other.png", SIZE, 1))).latents
    assert difference(other, latents[0]) > 1e-3
    with pytest.raises(InputError, match=r"give `FluxControlExtraInputs\.control_path`"):
        make(control, None)


def test_control_latents_can_be_fed(control: Pipeline, save: Callable[..., str]) -> None:
    fed = {TensorKey.AUX_LATENT: torch.randn(1, 4, 4, 6, generator=torch.Generator().manual_seed(1))}
    assert torch.equal(make(control, None, feeds=fed).latents, make(control, None, feeds=fed).latents)
    with pytest.raises(InputError, match=r"AUX_LATENT is fed, so `extra_inputs\.control_path` would not be read"):
        make(control, FluxControlExtraInputs(control_path=save("in.png", SIZE)), feeds=fed)
    with pytest.raises(InputError, match=r"must be \[1, c, 4, 6\] with 4 channels in all, got \(1, 5, 4, 6\)"):
        make(control, None, feeds={TensorKey.AUX_LATENT: torch.zeros(1, 5, 4, 6)})


def test_control_begins_at_noise(control: Pipeline, save: Callable[..., str]) -> None:
    extra = FluxControlExtraInputs(control_path=save("in.png", SIZE))
    with pytest.raises(UnsupportedOptionError, match=r"does not begin at an image; families that do: .*FLUX\.1"):
        make(control, extra, strength=0.5)


def test_files_of_a_command_line_for_control(control: Pipeline) -> None:
    assert control.family.take_media(MediaInputs(control="c.png")) == FluxControlExtraInputs(control_path="c.png")
    with pytest.raises(InputError, match=r"FLUX\.1 Control takes no `images`; it takes `control`"):
        control.family.take_media(MediaInputs(images=("a.png",)))
