"""Requests: prompts, seeds, sizes, guidance, outputs, and arguments that cannot be used."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kdit import (
    ExecuteConfig,
    InputError,
    OutputError,
    Pipeline,
    SampleConfig,
    UnsupportedOptionError,
)
from kdit.pipelines.context_builders.flux import FluxExtraInputs
from kdit.pipelines.extra_inputs import ExtraInputs
from tests.models.fill import distance
from tests.pipelines.small import CFG, make, runtime


def test_one_prompt_gives_one_picture(dev: Pipeline) -> None:
    result = make(dev)
    assert [image.size for image in result.images] == [(32, 48)]
    assert result.pixels is not None and result.pixels.shape == (1, 48, 32, 3)
    assert result.latents.shape == (1, 6, 16) and result.seeds == (3,)
    assert {"text_encode", "prepare", "denoise", "vae_decode", "total"} <= result.timings.keys()
    assert result.notices == ()


def test_repeating_a_request_repeats_its_bits(dev: Pipeline) -> None:
    assert torch.equal(make(dev).latents, make(dev).latents)


def test_a_list_of_prompts_gives_each_its_own_seed(dev: Pipeline) -> None:
    prompts = ["a red fox", "word " * 60, "a"]
    sample = SampleConfig(steps=2, max_sequence_length=200, cfg_scale=2.0)
    together = make(dev, prompts, sample_config=sample)
    assert together.seeds == (3, 4, 5)
    for i, prompt in enumerate(prompts):
        alone = make(dev, prompt, sample_config=sample, runtime_config=runtime(seed=3 + i))
        assert distance(together.latents[i : i + 1], alone.latents) < 1e-6


def test_batches_can_be_bit_equal(dev_folder: Path) -> None:
    pipe = Pipeline.from_models(dev_folder, execute_config=ExecuteConfig(batch_invariant=True))
    both = make(pipe, ["a red fox", "two boats"], sample_config=CFG)
    alone = make(pipe, "two boats", sample_config=CFG, runtime_config=runtime(seed=4))
    assert torch.equal(both.latents[1:], alone.latents)
    assert both.pixels is not None and alone.pixels is not None and torch.equal(both.pixels[1:], alone.pixels)
    inline = Pipeline.from_models(dev_folder, execute_config=ExecuteConfig(batch_invariant=True, modulation="inline"))
    assert torch.equal(make(inline, ["a red fox", "two boats"], sample_config=CFG).latents, both.latents)


def test_seed_0_is_a_seed(dev: Pipeline) -> None:
    zero = make(dev, runtime_config=runtime(seed=0))
    assert zero.seeds == (0,) and zero.settings["seeds"] == [0]
    assert torch.equal(zero.latents, make(dev, runtime_config=runtime(seed=0)).latents)
    assert distance(make(dev).latents, zero.latents) > 0.1


def test_without_a_seed_one_is_drawn_and_told(dev: Pipeline) -> None:
    first, second = (make(dev, runtime_config=runtime(seed=None)) for _ in range(2))
    assert first.seeds != second.seeds
    assert torch.equal(make(dev, runtime_config=runtime(seed=first.seeds[0])).latents, first.latents)


def test_a_tuple_gives_each_sample_a_seed(dev: Pipeline) -> None:
    result = make(dev, ["a", "b"], runtime_config=runtime(seed=(9, 9)))
    assert result.seeds == (9, 9)
    with pytest.raises(InputError, match="1 seeds for 2 prompts"):
        make(dev, ["a", "b"], runtime_config=runtime(seed=(9,)))


@pytest.mark.parametrize("prompt", ["", "かわいい 😄 ō", "a (red) bow, ((a:1.2)) [b] \\(c\\)", "\n\t "])
def test_any_text_is_a_prompt(dev: Pipeline, prompt: str) -> None:
    assert torch.isfinite(make(dev, prompt).latents).all()


def test_a_long_prompt_is_cut_with_a_notice_per_encoder_or_refused(
    dev: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = "fox " * 600
    with caplog.at_level(logging.WARNING, logger="kdit"):
        cut = make(dev, prompt)
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == len(cut.notices) == 2 and "T5TextEncoder, which takes 12" in lines[0]
    assert "CLIPTextEncoder, which takes 77" in lines[1] and cut.notices[1] in lines[1]
    # CLIP reads on beyond T5's 12 tokens, but not beyond 77
    assert torch.equal(cut.latents, make(dev, "fox " * 300).latents)
    assert not torch.equal(cut.latents, make(dev, "fox " * 9).latents)
    with pytest.raises(InputError, match="T5TextEncoder, which takes 12"):
        make(dev, prompt, sample_config=SampleConfig(steps=2, max_sequence_length=12, on_long_prompt="reject"))


@pytest.mark.parametrize(
    ("prompt", "told"), [([], "empty list"), (["a", 3], r"prompt`\[1\] must be a string, got int")]
)
def test_what_is_no_prompt_is_refused(dev: Pipeline, prompt: list[str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        make(dev, prompt)


@pytest.mark.parametrize(("size", "nearest"), [((17, 31), "16x32"), ((1, 1), "16x16"), ((1920, 1080), "1920x1088")])
def test_a_size_off_the_grid_is_refused_with_the_nearest(dev: Pipeline, size: tuple[int, int], nearest: str) -> None:
    with pytest.raises(InputError, match=f"multiples of 16; nearest: {nearest}"):
        make(dev, runtime_config=runtime(size=size))


def test_a_picture_has_one_frame(dev: Pipeline) -> None:
    with pytest.raises(InputError, match="frame_num` is 5"):
        make(dev, runtime_config=runtime(frame_num=5))


def test_defaults_are_the_models_own(dev: Pipeline, schnell: Pipeline) -> None:
    assert (dev.defaults.steps, dev.defaults.guidance_scale) == (28, 3.5)
    assert (schnell.defaults.steps, schnell.defaults.guidance_scale) == (4, None)
    settings = make(schnell, sample_config=SampleConfig(max_sequence_length=12)).settings
    assert (settings["steps"], settings["guidance_scale"], settings["cfg_scale"]) == (4, None, 1.0)


def test_classifier_free_guidance_needs_a_scale_above_1(dev: Pipeline) -> None:
    plain = make(dev)
    unused = make(dev, prompt_negative="blurry")
    assert torch.equal(plain.latents, unused.latents)
    assert len(unused.notices) == 1 and "prompt_negative` has no effect" in unused.notices[0]
    empty = make(dev, sample_config=CFG)
    assert torch.equal(empty.latents, make(dev, sample_config=CFG, prompt_negative="").latents)
    assert distance(plain.latents, empty.latents) > 1e-3
    assert distance(make(dev, sample_config=CFG, prompt_negative="blurry").latents, empty.latents) > 1e-3
    assert empty.settings["negative_prompt"] == ""


def test_negative_prompts_match_the_prompts(dev: Pipeline) -> None:
    with pytest.raises(InputError, match="prompt_negative` has 2 entries for 1 prompts"):
        make(dev, prompt_negative=["a", "b"], sample_config=CFG)
    each = make(dev, ["a", "b"], prompt_negative=["c", "d"], sample_config=CFG)
    alone = make(dev, "b", prompt_negative="d", sample_config=CFG, runtime_config=runtime(seed=4))
    assert distance(each.latents[1:], alone.latents) < 1e-6


def test_guidance_without_an_input_for_it_is_told(schnell: Pipeline) -> None:
    result = make(schnell, sample_config=SampleConfig(steps=2, max_sequence_length=12, guidance_scale=5.0))
    assert "`guidance_scale` 5 has no effect" in result.notices[0]
    assert torch.equal(result.latents, make(schnell).latents)
    with pytest.raises(UnsupportedOptionError, match="cfg_scale_2"):
        make(schnell, sample_config=SampleConfig(cfg_scale_2=2.0))


def test_a_second_prompt_goes_to_t5(dev: Pipeline) -> None:
    same = make(dev, extra_inputs=FluxExtraInputs(prompt_2="a red fox"))
    assert torch.equal(same.latents, make(dev).latents)
    assert distance(make(dev, extra_inputs=FluxExtraInputs(prompt_2="boats")).latents, same.latents) > 1e-3
    with pytest.raises(InputError, match="needs classifier-free guidance"):
        make(dev, extra_inputs=FluxExtraInputs(negative_prompt_2="x"))

    class Other(ExtraInputs):
        pass

    with pytest.raises(InputError, match="takes FluxExtraInputs, got Other"):
        make(dev, extra_inputs=Other())


def test_the_text_length_has_a_limit(dev: Pipeline) -> None:
    with pytest.raises(InputError, match="513, but this model takes from 1 to 512"):
        make(dev, sample_config=SampleConfig(max_sequence_length=513))


def test_latents_only_stops_before_the_autoencoder(dev: Pipeline) -> None:
    result = make(dev, runtime_config=runtime(output_type="latents"))
    assert result.images == [] and result.pixels is None and "vae_decode" not in result.timings
    assert torch.equal(result.latents, make(dev).latents)


def test_pictures_carry_their_settings(dev: Pipeline, tmp_path: Path) -> None:
    paths = tuple(str(tmp_path / f"{i}.png") for i in range(2))
    result = make(dev, ["かわいい 😄", "b"], sample_config=CFG, runtime_config=runtime(save_paths=paths))
    for i, path in enumerate(paths):
        with Image.open(path) as image:
            told = json.loads(image.text["kdit"])  # type: ignore[attr-defined]
            assert np.array_equal(np.asarray(image), np.asarray(result.images[i]))
        assert (told["prompt"], told["seed"], told["negative_prompt"]) == (["かわいい 😄", "b"][i], 3 + i, "")
        assert told["steps"] == 2 and told["model_hash"] == dev.model_hash and "seeds" not in told
    json.dumps(result.settings)


@pytest.mark.parametrize("name", ["missing/a.png", "a.bmp", "a.mp4"])
def test_an_output_that_cannot_be_written_is_refused_first(dev: Pipeline, tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError):
        make(dev, runtime_config=runtime(save_paths=(str(tmp_path / name),)))
    with pytest.raises(InputError, match="1 `save_paths` for 2 samples"):
        make(dev, ["a", "b"], runtime_config=runtime(save_paths=(str(tmp_path / "a.png"),)))
    with pytest.raises(InputError, match="latents"):
        make(dev, runtime_config=runtime(save_paths=(str(tmp_path / "a.png"),), output_type="latents"))


@pytest.mark.parametrize("names", [("a.png", "a.png"), ("a.png", "./a.png")])
def test_pictures_do_not_overwrite_each_other(dev: Pipeline, tmp_path: Path, names: tuple[str, str]) -> None:
    paths = tuple(f"{tmp_path}/{name}" for name in names)
    with pytest.raises(InputError, match="save_paths` must differ"):
        make(dev, ["a", "b"], runtime_config=runtime(save_paths=paths))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (dict(prompt=None), "prompt` must be a string or a list of strings, got NoneType"),
        (dict(prompt={"a": 1}), "got dict"),
        (dict(prompt="a\ud83d"), "not valid Unicode"),
        (dict(prompt_negative=4), "prompt_negative` must be a string"),
        (dict(sample_config={"steps": 2}), "expected SampleConfig, got dict"),
        (dict(runtime_config={"seed": 2}), "expected RuntimeConfig, got dict"),
        (dict(extra_inputs="x"), "expected ExtraInputs, got str"),
        (dict(callback=3), "callback must be a function"),
        (dict(cancel=True), "cancel must be a CancelToken"),
        (
            dict(runtime_config=runtime(seed=2**63 - 1), prompt=["a", "b"]),
            "seed` 9223372036854775807 is too large for 2",
        ),
        (
            dict(runtime_config=runtime(size=(16 * 10**6, 16 * 10**6))),
            "needs at least .* GiB beside the weights; cpu has",
        ),
    ],
)
def test_arguments_of_the_wrong_kind_are_told(dev: Pipeline, arguments: dict[str, object], told: str) -> None:
    prompt = arguments.pop("prompt", "a")
    with pytest.raises(InputError, match=told):
        make(dev, prompt, **arguments)  # type: ignore[arg-type]
