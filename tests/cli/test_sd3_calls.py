"""verify: how a recorded call of StableDiffusion3Pipeline or its Img2Img becomes a request."""

from pathlib import Path

import pytest
import torch

from kdit.cli.verify.call_mapping import Request, mapping_of
from kdit.cli.verify.case import ImageFile, Seed
from kdit.config import SampleConfig
from kdit.errors import InputError
from kdit.keys import TensorKey
from kdit.pipelines.context_builders.sd3 import SD3ExtraInputs
from tests.cli.cases import make_case

CALL = {"prompt": "a red fox", "height": 64, "width": 96, "num_inference_steps": 3, "generator": Seed(5)}
MAPPING = mapping_of("StableDiffusion3Pipeline")


def request_of(**call: object) -> Request:
    return MAPPING.request(make_case({**CALL, **call}, pipeline="StableDiffusion3Pipeline"), {})


def test_values_that_are_not_given_are_those_of_the_reference() -> None:
    request = MAPPING.request(make_case({"prompt": "a", "generator": Seed(0)}), {})
    assert (request.runtime_config.size, request.runtime_config.seed) == ((1024, 1024), 0)
    assert request.sample_config == SampleConfig(steps=28, cfg_scale=7.0, max_sequence_length=256)
    assert (request.extra_inputs, request.feeds, request.prompt_negative) == (None, None, None)


def test_guidance_scale_is_classifier_free_guidance() -> None:
    assert request_of(guidance_scale=4.0, negative_prompt="n").prompt_negative == "n"
    assert request_of(guidance_scale=4.0).sample_config.cfg_scale == 4.0


def test_without_guidance_what_needs_it_is_not_passed_on() -> None:
    request = request_of(
        guidance_scale=1.0,
        prompt_2="b",
        negative_prompt="n",
        negative_prompt_3="m",
        skip_guidance_layers=[1],
        skip_layer_guidance_scale=2.0,
    )
    assert request.prompt_negative is None
    assert request.extra_inputs == SD3ExtraInputs(prompt_2="b")
    assert MAPPING.denoiser_calls(request, 3) == {"transformer": 3}


def test_all_texts() -> None:
    texts = {"prompt_2": "b", "prompt_3": "c", "negative_prompt_2": "nb", "negative_prompt_3": ""}
    expected = SD3ExtraInputs(prompt_2="b", prompt_3="c", negative_prompt_2="nb")  # an empty text counts as none
    assert request_of(**texts).extra_inputs == expected
    several = request_of(prompt=["a", "b"], prompt_3=["c", "d"], num_images_per_prompt=2)
    assert (several.prompt, several.num_samples) == (["a", "a", "b", "b"], 4)
    assert several.extra_inputs == SD3ExtraInputs(prompt_3=["c", "c", "d", "d"])


def test_skipped_layers_cost_one_more_call_in_their_steps() -> None:
    request = request_of(
        guidance_scale=4.0,
        skip_guidance_layers=[1, 2],
        skip_layer_guidance_start=0.1,
        skip_layer_guidance_stop=0.8,
    )
    assert request.extra_inputs == SD3ExtraInputs(skip_layers=(1, 2), skip_layer_start=0.1, skip_layer_stop=0.8)
    assert MAPPING.denoiser_calls(request, 4) == {"transformer": 4 + 3}
    published = request_of(guidance_scale=4.0, skip_guidance_layers=[7])
    assert published.extra_inputs == SD3ExtraInputs(
        skip_layers=(7,), skip_layer_scale=2.8, skip_layer_start=0.01, skip_layer_stop=0.2
    )
    assert MAPPING.denoiser_calls(published, 28) == {"transformer": 28 + 5}  # steps 1 to 5
    with pytest.raises(InputError, match="skip_guidance_layers must be a list of whole numbers"):
        request_of(skip_guidance_layers=["1"])


def test_an_image_comes_with_the_defaults_of_its_pipeline() -> None:
    picture = ImageFile(Path("a.png"))
    request = MAPPING.request(make_case({"prompt": "a", "image": picture, "generator": Seed(0)}), {})
    assert request.extra_inputs == SD3ExtraInputs(image_path="a.png")
    assert (request.sample_config.steps, request.sample_config.strength) == (50, 0.6)
    assert request.feeds is None
    each = request_of(prompt=["a", "b"], image=[picture, picture], strength=0.0, generator=[Seed(1), Seed(2)])
    assert each.extra_inputs == SD3ExtraInputs(image_path=["a.png", "a.png"])
    assert each.sample_config.strength == 0
    with pytest.raises(InputError, match="argument image must be an image"):
        request_of(image=[picture, "b.png"])


def test_several_samples_of_one_generator_start_from_the_recorded_draws() -> None:
    draws = tuple({"key": f"noise.{i}", "by": by} for i, by in enumerate(("vae", "pipeline")))
    tensors = {f"noise.{i}": torch.full((2, 4, 8, 12), float(i)) for i in range(2)}
    call = {**CALL, "prompt": ["a", "b"], "image": ImageFile(Path("a.png"))}
    request = MAPPING.request(make_case(call, tensors, draws=draws), {})
    assert request.feeds is not None
    assert {key: float(t.mean()) for key, t in request.feeds.items()} == {  # type: ignore[union-attr]
        TensorKey.NOISE: 1.0,
        TensorKey.POSTERIOR_NOISE: 0.0,
    }
    with pytest.raises(InputError, match="one recorded draw of the autoencoder, got 0"):
        MAPPING.request(make_case(call, tensors, draws=draws[1:]), {})


@pytest.mark.parametrize("key", ["sigmas", "clip_skip", "mu"])
def test_an_argument_without_a_meaning_is_refused_by_name(key: str) -> None:
    with pytest.raises(InputError, match=f"cannot express .*{key}"):
        request_of(**{key: 2})


def test_the_negative_half_of_a_recorded_call_comes_first() -> None:
    halves = torch.cat([torch.zeros(2, 9, 8), torch.ones(2, 9, 8)])
    tensors = {
        "denoiser.transformer.call0.in.encoder_hidden_states": halves,
        "denoiser.transformer.call0.in.pooled_projections": halves[:, 0],
        "denoiser.transformer.call0.in.hidden_states": halves,
        "denoiser.transformer.call0.out": halves,
        "latents": halves[:2],
    }
    case = make_case({**CALL, "prompt": ["a", "b"], "guidance_scale": 2.0, "generator": [Seed(1), Seed(2)]}, tensors)
    request = MAPPING.request(case, {})
    found = MAPPING.embeddings(case, request)
    means = {key: [float(t.mean()) for _, t in pairs] for key, pairs in found.items()}
    assert means == {TensorKey.POSITIVE: [1.0, 1.0], TensorKey.NEGATIVE: [0.0, 0.0]}
    outputs = MAPPING.first_outputs(case, request)
    assert [(name, float(t.mean())) for name, t in outputs] == [("positive", 1.0), ("negative", 0.0)]
    assert MAPPING.initial_latents(case).shape[0] == 2
    unguided = MAPPING.request(make_case({**CALL, "guidance_scale": 1.0}), {})
    assert [name for name, _ in MAPPING.first_outputs(case, unguided)] == ["positive"]


@pytest.mark.parametrize("with_t5", [True, False])
def test_encoder_outputs_are_joined_as_the_denoiser_gets_them(with_t5: bool) -> None:
    clip = [torch.full((1, 3, 2), 1.0), torch.ones(1, 4), torch.full((1, 3, 3), 2.0), torch.zeros(1, 5)]
    t5 = [torch.full((1, 2, 7), 3.0)] if with_t5 else []
    text, pooled = MAPPING.joined([*clip, *t5], [("text", torch.empty(1, 5, 7)), ("pooled", torch.empty(1, 9))])
    assert text[0, 0].tolist() == [1, 1, 2, 2, 2, 0, 0]
    assert text[0, 3].tolist() == [3.0 if with_t5 else 0.0] * 7
    assert pooled.tolist() == [[1.0] * 4 + [0.0] * 5]
