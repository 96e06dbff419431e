"""SD3's image to image: strength, the size that follows from the image, files for each sample."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kdit import ExecuteConfig, InputError, Pipeline, RuntimeConfig, SampleConfig, TensorKey
from kdit.pipelines.context_builders.sd3 import SD3ExtraInputs
from kdit.pipelines.extra_inputs import MediaInputs
from tests.models.fill import distance
from tests.pipelines.sd3_images import picture
from tests.pipelines.small import make, start

SEED = RuntimeConfig(seed=3)


def config(strength: float | None = None) -> SampleConfig:
    return SampleConfig(steps=4, max_sequence_length=12, cfg_scale=2.0, strength=strength)


@pytest.fixture(scope="module")
def folder(reference_family: Callable[[str], Path]) -> Path:
    return reference_family("sd35_medium") / "model"


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Pipeline:
    return Pipeline.from_models(folder)


def test_strength_0_gives_the_picture_back(pipe: Pipeline, tmp_path: Path) -> None:
    path, out = picture(tmp_path / "a.png", (48, 32), 1), tmp_path / "out.png"
    runtime = RuntimeConfig(seed=3, save_paths=(str(out),))
    result = make(pipe, sample_config=config(0.0), runtime_config=runtime, extra_inputs=SD3ExtraInputs(image_path=path))
    with Image.open(path) as given, Image.open(out) as saved:
        assert np.array_equal(np.asarray(given), np.asarray(result.images[0]))
        assert np.array_equal(np.asarray(given), np.asarray(saved))
    assert "denoise" not in result.timings and result.settings["strength"] == 0
    # the latents are the encoded picture: decoded they are near what it was, but not the picture itself
    decoded = make(pipe, feeds={TensorKey.LATENTS: result.latents}, runtime_config=RuntimeConfig(size=(48, 32)))
    assert decoded.pixels is not None and result.pixels is not None
    assert not torch.equal(decoded.pixels, result.pixels)


def test_strength_0_of_another_size_gives_the_scaled_picture(pipe: Pipeline, tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", (48, 32), 1)
    for size, fit in (((32, 48), "reject"), ((36, 44), "crop")):
        runtime = RuntimeConfig(seed=3, size=size, fit=fit)  # type: ignore[arg-type]
        extra = SD3ExtraInputs(image_path=path)
        result = make(pipe, sample_config=config(0.0), runtime_config=runtime, extra_inputs=extra)
        assert result.images[0].size == size
        if fit == "reject":
            with Image.open(path) as given:
                expected = given.resize(size, Image.Resampling.LANCZOS)
            assert np.array_equal(np.asarray(expected), np.asarray(result.images[0]))


def test_a_default_strength_applies_and_is_told(pipe: Pipeline, tmp_path: Path) -> None:
    extra = SD3ExtraInputs(image_path=picture(tmp_path / "a.png", (48, 32), 1))
    plain = make(pipe, sample_config=config(), runtime_config=SEED, extra_inputs=extra)
    assert plain.settings["strength"] == 0.6
    assert torch.equal(
        plain.latents, make(pipe, sample_config=config(0.6), runtime_config=SEED, extra_inputs=extra).latents
    )
    assert make(pipe).settings["strength"] is None


def test_strength_1_ignores_the_picture(pipe: Pipeline, tmp_path: Path) -> None:
    one, two = (
        make(
            pipe,
            sample_config=config(1.0),
            runtime_config=SEED,
            extra_inputs=SD3ExtraInputs(image_path=picture(tmp_path / f"{i}.png", (48, 32), i)),
        )
        for i in range(2)
    )
    assert torch.equal(one.latents, two.latents)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ((48, 32), (48, 32)),
        ((50, 41), (64, 48)),
        ((104, 152), (112, 160)),
        ((5, 201), (16, 208)),
        ((900, 300), (384, 128)),
    ],
)
def test_the_size_is_the_pictures_own_at_the_multiples_that_keep_its_shape(
    pipe: Pipeline, tmp_path: Path, own: tuple[int, int], expected: tuple[int, int]
) -> None:
    extra = SD3ExtraInputs(image_path=picture(tmp_path / "a.png", own, 1))
    assert pipe.request("a", extra_inputs=extra).inputs.output_size == expected
    stated = pipe.request("a", extra_inputs=extra, runtime_config=RuntimeConfig(size=(64, 32)))
    assert stated.inputs.output_size == (64, 32)


def test_a_turned_photo_counts_upright(pipe: Pipeline, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.new("RGB", (64, 32), (200, 30, 30)).save(tmp_path / "a.jpg", exif=exif)
    extra = SD3ExtraInputs(image_path=str(tmp_path / "a.jpg"))
    assert make(pipe, sample_config=config(), runtime_config=SEED, extra_inputs=extra).images[0].size == (32, 64)


def test_one_picture_serves_all_samples_or_each_has_its_own(pipe: Pipeline, tmp_path: Path) -> None:
    paths = [picture(tmp_path / f"{i}.png", (48, 32), i) for i in range(2)]

    def made(prompt: str | list[str], image: str | list[str], seed: int = 3) -> torch.Tensor:
        extra, runtime = SD3ExtraInputs(image_path=image), RuntimeConfig(seed=seed, size=(48, 32))
        return make(pipe, prompt, sample_config=config(), runtime_config=runtime, extra_inputs=extra).latents

    shared, own = made(["a", "b"], paths[0]), made(["a", "b"], paths)
    assert distance(shared[1:], made("b", paths[0], 4)) < 1e-5
    assert distance(own[1:], made("b", paths[1], 4)) < 1e-5
    assert torch.equal(shared[:1], own[:1]) and distance(shared[1:], own[1:]) > 1e-2
    with pytest.raises(InputError, match="image_path` has 2 entries for 1 prompts"):
        made("a", paths)


def test_latents_can_be_changed_instead_of_a_picture(pipe: Pipeline, tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", (48, 32), 1)
    extra = SD3ExtraInputs(image_path=path)
    encoded = make(pipe, sample_config=config(0.0), runtime_config=SEED, extra_inputs=extra).latents
    with start(pipe, "a red fox", sample_config=config(0.6), runtime_config=SEED, extra_inputs=extra) as run:
        first = run.peek()["latents"]
    runtime = RuntimeConfig(seed=3, size=(48, 32))
    fed = {TensorKey.BASE_LATENT: encoded}
    with start(pipe, "a red fox", sample_config=config(0.6), runtime_config=runtime, feeds=fed) as run:
        assert run.steps_left == 3
        assert distance(run.peek()["latents"], first) > 0.1  # nothing was drawn for a posterior, so other noise
    unchanged = make(pipe, sample_config=config(0.0), runtime_config=runtime, feeds=fed)
    assert torch.equal(unchanged.latents, encoded)
    with pytest.raises(InputError, match="image_path` and fed BASE_LATENT are both the image to change"):
        make(pipe, sample_config=config(0.6), feeds=fed, extra_inputs=extra)


def test_a_posterior_can_be_fed(pipe: Pipeline, tmp_path: Path) -> None:
    extra = SD3ExtraInputs(image_path=picture(tmp_path / "a.png", (48, 32), 1))
    drawn = torch.randn(1, 4, 4, 6, generator=torch.Generator().manual_seed(3))

    def made(feeds: dict[TensorKey, torch.Tensor] | None) -> torch.Tensor:
        return make(pipe, sample_config=config(0.3), runtime_config=SEED, extra_inputs=extra, feeds=feeds).latents

    assert torch.equal(made({TensorKey.POSTERIOR_NOISE: drawn}), made(None))
    assert not torch.equal(made({TensorKey.POSTERIOR_NOISE: -drawn}), made(None))
    with pytest.raises(InputError, match="POSTERIOR_NOISE is fed, but there is no image"):
        make(pipe, feeds={TensorKey.POSTERIOR_NOISE: drawn})


def test_the_posterior_is_drawn_in_the_autoencoders_dtype(folder: Path, tmp_path: Path) -> None:
    extra = SD3ExtraInputs(image_path=picture(tmp_path / "a.png", (48, 32), 1))
    mixed = Pipeline.from_models(folder, execute_config=ExecuteConfig(component_dtypes={"vae": "bfloat16"}))
    generator = torch.Generator().manual_seed(3)
    torch.randn(1, 4, 4, 6, generator=generator, dtype=torch.bfloat16)
    noise = torch.randn(1, 4, 4, 6, generator=generator)
    result = make(mixed, sample_config=config(1.0), runtime_config=SEED, extra_inputs=extra)
    fed = make(
        mixed, sample_config=config(), runtime_config=RuntimeConfig(size=(48, 32)), feeds={TensorKey.NOISE: noise}
    )
    assert torch.equal(result.latents, fed.latents)


def test_a_strength_needs_a_picture(pipe: Pipeline, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"strength` is 0\.5, but there is no image to change"):
        make(pipe, sample_config=config(0.5))
    with pytest.raises(InputError, match=r"no\.png"):
        make(pipe, extra_inputs=SD3ExtraInputs(image_path=str(tmp_path / "no.png")))


def test_pictures_of_the_command_line(pipe: Pipeline) -> None:
    assert pipe.family.take_media(MediaInputs(images=("a.png",))) == SD3ExtraInputs(image_path="a.png")
    assert pipe.family.take_media(MediaInputs(images=("a", "b"))) == SD3ExtraInputs(image_path=["a", "b"])
    with pytest.raises(InputError, match="Stable Diffusion 3 takes no `mask`; it takes `images`"):
        pipe.family.take_media(MediaInputs(images=("a",), mask="m"))


def test_what_was_read_is_written_down(pipe: Pipeline, tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", (48, 32), 1)
    settings = make(
        pipe, sample_config=config(), runtime_config=SEED, extra_inputs=SD3ExtraInputs(image_path=path)
    ).settings
    told = json.loads(json.dumps(settings))
    assert told["extra_inputs"] == {"image_path": path} and set(told["input_files"]) == {path}
