"""verify: how a recorded call of FluxPipeline becomes a request."""

from pathlib import Path

import pytest
import torch

from kdit.cli.verify.call_mapping import Request, has_pipeline, mapping_of
from kdit.cli.verify.case import ImageFile, Seed
from kdit.cli.verify.pipeline_stages import COMPANION_PROMPTS, companion
from kdit.config import SampleConfig
from kdit.errors import InputError
from kdit.keys import TensorKey
from kdit.pipelines.context_builders.flux import (
    FluxControlExtraInputs,
    FluxExtraInputs,
    FluxFillExtraInputs,
    FluxKontextExtraInputs,
    FluxTextInputs,
)
from tests.cli.cases import make_case

GUIDED, UNGUIDED = {"guidance_embeds": True}, {"guidance_embeds": False}
PICTURE = ImageFile(Path("in.png"))
CALL = {"prompt": "a red fox", "height": 64, "width": 96, "num_inference_steps": 3, "generator": Seed(5)}


def request_of(transformer: dict[str, object] = GUIDED, **call: object) -> Request:
    return mapping_of("FluxPipeline").request(make_case({**CALL, **call}), transformer)


def test_size_is_width_then_height_and_one_sample_starts_from_its_seed() -> None:
    request = request_of()
    assert request.prompt == "a red fox"
    assert request.runtime_config.size == (96, 64)
    assert request.runtime_config.seed == 5
    assert request.feeds is None
    assert request.sample_config.steps == 3


def test_seed_zero_is_a_seed() -> None:
    assert request_of(generator=Seed(0)).runtime_config.seed == 0


def test_values_that_are_not_given_are_those_of_the_reference() -> None:
    case = make_case({"prompt": "a", "generator": Seed(0)})
    request = mapping_of("FluxPipeline").request(case, GUIDED)
    assert request.runtime_config.size == (1024, 1024)
    assert request.sample_config == SampleConfig(steps=28, guidance_scale=3.5, cfg_scale=1.0, max_sequence_length=512)


def test_guidance_is_embedded_only_where_the_network_has_it() -> None:
    assert request_of(guidance_scale=1.7).sample_config.guidance_scale == 1.7
    assert request_of(UNGUIDED, guidance_scale=1.7).sample_config.guidance_scale is None


def test_text_length() -> None:
    assert request_of(max_sequence_length=37).sample_config.max_sequence_length == 37


@pytest.mark.parametrize(
    ("call", "negative", "cfg_scale"),
    [
        ({"negative_prompt": "blurry", "true_cfg_scale": 2.5}, "blurry", 2.5),
        ({"negative_prompt": "", "true_cfg_scale": 2.5}, "", 2.5),
        ({"true_cfg_scale": 2.5}, None, 1.0),
        ({"negative_prompt": "blurry"}, None, 1.0),
        ({"negative_prompt": "blurry", "true_cfg_scale": 1}, None, 1.0),
    ],
)
def test_guidance_needs_a_scale_and_a_negative_prompt(
    call: dict[str, object], negative: str | None, cfg_scale: float
) -> None:
    request = request_of(**call)
    assert request.prompt_negative == negative
    assert request.sample_config.cfg_scale == cfg_scale


def test_second_prompts_are_extra_inputs() -> None:
    assert request_of().extra_inputs is None
    extra = request_of(prompt_2="two", negative_prompt="n", negative_prompt_2="n two", true_cfg_scale=2).extra_inputs
    assert getattr(extra, "prompt_2", None) == "two"
    assert getattr(extra, "negative_prompt_2", None) == "n two"


def test_several_samples_of_one_generator_start_from_the_recorded_draw() -> None:
    request = request_of(prompt=["a", "b"])
    assert request.num_samples == 2
    assert request.feeds is not None
    assert torch.equal(request.feeds[TensorKey.NOISE], torch.ones(2, 4, 8, 12))  # type: ignore[arg-type]


def test_images_per_prompt_repeat_every_prompt_and_start_from_the_recorded_draw() -> None:
    draw = torch.arange(4.0).reshape(4, 1, 1, 1)
    call = {
        **CALL,
        "prompt": ["a", "b"],
        "prompt_2": ["a2", "b2"],
        "negative_prompt": ["n", "m"],
        "negative_prompt_2": "one for all",
        "true_cfg_scale": 2.0,
        "num_images_per_prompt": 2,
    }
    request = mapping_of("FluxPipeline").request(make_case(call, {"noise.0": draw}), GUIDED)
    assert (request.prompt, request.num_samples) == (["a", "a", "b", "b"], 4)
    assert request.prompt_negative == ["n", "n", "m", "m"]
    assert getattr(request.extra_inputs, "prompt_2", None) == ["a2", "a2", "b2", "b2"]
    assert getattr(request.extra_inputs, "negative_prompt_2", None) == "one for all"
    assert request.feeds is not None and torch.equal(request.feeds[TensorKey.NOISE], draw)  # type: ignore[arg-type]


def test_images_of_one_prompt() -> None:
    request = request_of(num_images_per_prompt=2)
    assert request.prompt == ["a red fox"] * 2
    assert request.feeds is not None and request.runtime_config.seed is None
    seeded = request_of(num_images_per_prompt=2, generator=[Seed(3), Seed(9)])
    assert (seeded.runtime_config.seed, seeded.feeds) == ((3, 9), None)
    assert request_of(num_images_per_prompt=1).prompt == "a red fox"


def test_a_generator_per_sample_is_a_seed_per_sample() -> None:
    request = request_of(prompt=["a", "b"], generator=[Seed(3), Seed(9)])
    assert request.runtime_config.seed == (3, 9)
    assert request.feeds is None


def test_given_latents_are_fed() -> None:
    latents = torch.zeros(1, 24, 16)
    request = request_of(latents=latents)
    assert request.feeds == {TensorKey.NOISE: latents}


@pytest.mark.parametrize("key", ["sigmas", "guidence_scale"])
def test_an_argument_without_a_meaning_is_refused_by_name(key: str) -> None:
    with pytest.raises(InputError, match=rf"some_flux/base: .*FluxPipeline: {key}"):
        request_of(**{key: 2})


@pytest.mark.parametrize(
    "call", [{"height": "64"}, {"num_inference_steps": 2.0}, {"prompt": 3}, {"latents": "x"}, {"generator": 7}]
)
def test_an_argument_of_another_kind_is_refused_by_name(call: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"argument {next(iter(call))} must be"):
        request_of(**call)


def test_without_seed_latents_and_draw_there_is_nothing_to_repeat() -> None:
    case = make_case({"prompt": ["a", "b"]}, draws=())
    with pytest.raises(InputError, match="one recorded draw"):
        mapping_of("FluxPipeline").request(case, GUIDED)


def test_branches_are_compared_with_their_own_calls() -> None:
    tensors = {
        f"denoiser.transformer.call{i}.{key}": torch.full((1, 1, 1), float(i))
        for i in (0, 1)
        for key in ("in.encoder_hidden_states", "in.pooled_projections", "out")
    }
    tensors["latents"] = torch.zeros(1, 1, 1)
    case = make_case({**CALL, "negative_prompt": "n", "true_cfg_scale": 2.0}, tensors)
    mapping = mapping_of("FluxPipeline")
    request = mapping.request(case, GUIDED)
    embeddings = mapping.embeddings(case, request)
    assert {key: [float(t) for _, t in pairs] for key, pairs in embeddings.items()} == {
        TensorKey.POSITIVE: [0.0, 0.0],
        TensorKey.NEGATIVE: [1.0, 1.0],
    }
    assert [(name, float(t)) for name, t in mapping.first_outputs(case, request)] == [
        ("positive", 0.0),
        ("negative", 1.0),
    ]
    assert mapping.denoiser_calls(request, 3) == {"transformer": 6}


# ---- calls with images


def image_request(pipeline: str, **call: object) -> Request:
    return mapping_of(pipeline).request(make_case({**CALL, **call}, pipeline=pipeline), GUIDED)


@pytest.mark.parametrize(
    ("pipeline", "arguments", "extra", "sample"),
    [
        (
            "FluxImg2ImgPipeline",
            {"image": PICTURE, "strength": 0.4, "prompt_2": "two"},
            FluxExtraInputs(image_path="in.png", prompt_2="two"),
            {"strength": 0.4, "guidance_scale": 7.0},
        ),
        (
            "FluxFillPipeline",
            {"image": [PICTURE, PICTURE], "mask_image": PICTURE, "prompt": ["a", "b"], "generator": [Seed(1), Seed(2)]},
            FluxFillExtraInputs(image_path=["in.png"] * 2, mask_path="in.png"),
            {"strength": 1.0, "guidance_scale": 30.0},
        ),
        (
            "FluxControlPipeline",
            {"control_image": PICTURE},
            FluxControlExtraInputs(control_path="in.png"),
            {"strength": None, "guidance_scale": 3.5},
        ),
        (
            "FluxKontextPipeline",
            {"image": PICTURE, "_auto_resize": False, "max_area": 64 * 96},
            FluxKontextExtraInputs(image_paths="in.png", auto_resize=False),
            {"strength": None, "guidance_scale": 3.5},
        ),
    ],
)
def test_images_are_extra_inputs(
    pipeline: str, arguments: dict[str, object], extra: FluxTextInputs, sample: dict[str, object]
) -> None:
    request = image_request(pipeline, **arguments)
    assert request.extra_inputs == extra and request.feeds is None
    assert {name: getattr(request.sample_config, name) for name in sample} == sample
    assert request.runtime_config.size == (96, 64)


def test_steps_of_fill_are_those_of_the_reference() -> None:
    call = {key: value for key, value in CALL.items() if key != "num_inference_steps"}
    case = make_case({**call, "image": PICTURE, "mask_image": PICTURE}, pipeline="FluxFillPipeline")
    assert mapping_of("FluxFillPipeline").request(case, GUIDED).sample_config.steps == 50


@pytest.mark.parametrize(
    ("asked", "area", "made"),
    [((96, 64), 64 * 96, (96, 64)), ((512, 512), 1024**2, (1024, 1024)), ((64, 96), 9000, (64, 112))],
)
def test_kontext_makes_the_area_in_the_shape_that_is_asked_for(
    asked: tuple[int, int], area: int, made: tuple[int, int]
) -> None:
    request = image_request("FluxKontextPipeline", width=asked[0], height=asked[1], max_area=area)
    assert request.runtime_config.size == made


def test_a_batch_of_kontext_images_cannot_be_expressed() -> None:
    with pytest.raises(InputError, match="a list of images is a batch"):
        image_request("FluxKontextPipeline", image=[PICTURE, PICTURE])


def test_where_noise_is_fed_so_is_the_last_posterior() -> None:
    draws = [{"key": f"noise.{i}", "by": by} for i, by in enumerate(("vae", "pipeline_flux_fill", "vae"))]
    tensors = {f"noise.{i}": torch.full((2, 4, 8, 12), float(i)) for i in range(3)}
    call = {**CALL, "prompt": ["a", "b"], "image": PICTURE, "mask_image": PICTURE}
    case = make_case(call, tensors, pipeline="FluxFillPipeline", draws=tuple(draws))
    feeds = mapping_of("FluxFillPipeline").request(case, GUIDED).feeds
    assert feeds is not None and set(feeds) == {TensorKey.NOISE, TensorKey.POSTERIOR_NOISE}
    assert float(feeds[TensorKey.NOISE][0, 0, 0, 0]) == 1 and float(feeds[TensorKey.POSTERIOR_NOISE][0, 0, 0, 0]) == 2  # type: ignore[call-overload]


def test_tokens_and_channels_of_images_are_not_compared() -> None:
    tensors = {
        "latents": torch.zeros(1, 24, 16),
        "denoiser.transformer.call0.in.hidden_states": torch.arange(30.0)[None, :, None] + torch.arange(20) / 100,
        "denoiser.transformer.call0.out": torch.arange(30.0)[None, :, None].expand(1, 30, 16),
    }
    case = make_case({**CALL, "image": PICTURE}, tensors, pipeline="FluxKontextPipeline")
    mapping = mapping_of("FluxKontextPipeline")
    initial = mapping.initial_latents(case)
    assert initial.shape == (1, 24, 16) and float(initial.max()) == pytest.approx(23.15)
    ((_, output),) = mapping.first_outputs(case, mapping.request(case, GUIDED))
    assert output.shape == (1, 24, 16)


@pytest.mark.parametrize("call", [{"image": "in.png"}, {"image": [PICTURE, 3]}, {"_auto_resize": 1}])
def test_an_image_argument_of_another_kind_is_refused_by_name(call: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"argument {next(iter(call))} must be"):
        image_request("FluxKontextPipeline", **call)


def test_only_known_classes_have_a_pipeline() -> None:
    assert has_pipeline("FluxPipeline")
    assert not has_pipeline("FluxInpaintPipeline")
    with pytest.raises(InputError, match="no pipeline for FluxInpaintPipeline"):
        mapping_of("FluxInpaintPipeline")


def test_a_companion_differs_in_everything_but_shapes() -> None:
    request = request_of(prompt=["a", "b"], negative_prompt=["n", "m"], true_cfg_scale=2.0, guidance_scale=3.0)
    others = [companion(request, i, 2 - i) for i in (0, 1)]
    assert [other.prompt for other in others] == [[text] * 2 for text in COMPANION_PROMPTS]
    assert [other.sample_config.steps for other in others] == [5, 4]
    everyone = [request, *others]
    for name in ("guidance_scale", "cfg_scale"):
        assert len({getattr(each.sample_config, name) for each in everyone}) == 3
    assert len({each.runtime_config.seed for each in everyone}) == 3
    assert {each.runtime_config.size for each in everyone} == {(96, 64)}
    assert all(other.feeds is None for other in others)


def test_a_companion_keeps_guidance_off() -> None:
    config = companion(request_of(UNGUIDED), 0, 1).sample_config
    assert (config.guidance_scale, config.cfg_scale) == (None, 1.0)
