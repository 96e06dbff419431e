"""verify: how a recorded call of a Wan pipeline becomes a request."""

from pathlib import Path

import pytest
import torch

from kdit.cli.verify.call_mapping import Request, mapping_of
from kdit.cli.verify.case import ImageFile, Seed
from kdit.config import SampleConfig
from kdit.errors import InputError
from kdit.keys import TensorKey
from kdit.pipelines.context_builders.wan import WanI2VExtraInputs
from tests.cli.cases import make_case

CALL = {"prompt": "a fox", "height": 48, "width": 64, "num_frames": 9, "num_inference_steps": 3, "generator": Seed(5)}
MAPPING = mapping_of("WanPipeline")


def request_of(**call: object) -> Request:
    return MAPPING.request(make_case({**CALL, **call}, pipeline="WanPipeline"), {})


def test_values_that_are_not_given_are_those_of_the_reference() -> None:
    request = MAPPING.request(make_case({"prompt": "a", "generator": Seed(0)}), {})
    runtime = request.runtime_config
    assert (runtime.size, runtime.frame_num, runtime.seed) == ((832, 480), 81, 0)
    assert request.sample_config == SampleConfig(steps=50, cfg_scale=5.0, max_sequence_length=512)
    assert (request.extra_inputs, request.feeds, request.prompt_negative) == (None, None, None)


def test_both_guidance_scales_and_their_calls() -> None:
    request = request_of(guidance_scale=4.0, guidance_scale_2=3.0, negative_prompt="n")
    assert (request.sample_config.cfg_scale, request.sample_config.cfg_scale_2) == (4.0, 3.0)
    assert (request.prompt_negative, request.runtime_config.frame_num) == ("n", 9)
    assert MAPPING.denoiser_calls(request, 3) == {"transformer": 6}


def test_without_guidance_what_needs_it_is_not_passed_on() -> None:
    request = request_of(guidance_scale=1.0, guidance_scale_2=3.0, negative_prompt="n")
    assert (request.prompt_negative, request.sample_config.cfg_scale_2) == (None, None)
    assert MAPPING.denoiser_calls(request, 3) == {"transformer": 3}


def test_pictures_are_named_by_their_files(tmp_path: Path) -> None:
    start, end = tmp_path / "a.png", tmp_path / "b.png"
    assert request_of(image=ImageFile(start)).extra_inputs == WanI2VExtraInputs(start_img_path=str(start))
    both = request_of(image=ImageFile(start), last_image=ImageFile(end)).extra_inputs
    assert both == WanI2VExtraInputs(start_img_path=str(start), end_img_path=str(end))


def test_copies_and_noise() -> None:
    several = request_of(prompt=["a", "b"], num_videos_per_prompt=2)
    assert several.prompt == ["a", "a", "b", "b"]
    assert several.feeds is not None and set(several.feeds) == {TensorKey.NOISE}  # drawn from one generator
    given = torch.ones(1, 16, 3, 6, 8)
    fed = request_of(latents=given).feeds
    assert fed is not None and fed[TensorKey.NOISE] is given


def test_what_cannot_be_expressed_is_refused() -> None:
    with pytest.raises(InputError, match="kdit cannot express these arguments of WanPipeline: attention_kwargs"):
        request_of(attention_kwargs={"scale": 0.5})
    with pytest.raises(InputError, match="the call has no prompt"):
        request_of(prompt=None)


def test_recorded_tensors_are_found_by_branch() -> None:
    tensors = {
        "latents": torch.zeros(1, 16, 3, 6, 8),
        "denoiser.transformer.call0.in.hidden_states": torch.ones(1, 36, 3, 6, 8),
        "denoiser.transformer.call0.in.encoder_hidden_states": torch.full((1, 5, 4), 2.0),
        "denoiser.transformer.call0.out": torch.full((1, 16, 3, 6, 8), 3.0),
        "denoiser.transformer.call1.out": torch.full((1, 16, 3, 6, 8), 4.0),
    }
    case = make_case(CALL, tensors)
    guided, plain = request_of(), request_of(guidance_scale=1.0)
    assert MAPPING.initial_latents(case).shape == (1, 16, 3, 6, 8)
    assert list(MAPPING.embeddings(case, guided)) == [TensorKey.POSITIVE]  # the second was too large to be recorded
    tensors["denoiser.transformer.call1.in.encoder_hidden_states"] = torch.zeros(1, 5, 4)
    assert list(MAPPING.embeddings(case, guided)) == [TensorKey.POSITIVE, TensorKey.NEGATIVE]
    assert [float(t.mean()) for _, t in MAPPING.first_outputs(case, guided)] == [3.0, 4.0]
    assert [float(t.mean()) for _, t in MAPPING.first_outputs(case, plain)] == [3.0]
