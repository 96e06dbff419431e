import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kdit.cli.verify.call_mapping import Request, has_pipeline, mapping_of
from kdit.cli.verify.case import Case, Seed, find_families, read_case
from kdit.cli.verify.compare import StageReport, compare, failed, not_available, relative_error
from kdit.cli.verify.network_stage import recorded_calls
from kdit.cli.verify.pipeline_stages import COMPANION_PROMPTS, companion
from kdit.cli.verify.report import print_case, print_summary, report_json, stage_line
from kdit.cli.verify.run import CaseReport, VerifyOptions, VerifyReport, run_verify
from kdit.config import SampleConfig
from kdit.errors import CheckpointError, CheckpointMissingError, InputError
from kdit.keys import TensorKey

GUIDED, UNGUIDED = {"guidance_embeds": True}, {"guidance_embeds": False}
CALL = {"prompt": "a red fox", "height": 64, "width": 96, "num_inference_steps": 3, "generator": Seed(5)}


def make_case(call: dict[str, object], tensors: dict[str, Tensor] | None = None, **changes: object) -> Case:
    values: dict[str, object] = {
        "family": "some_flux",
        "name": "base",
        "pipeline": "FluxPipeline",
        "call": call,
        "draws": ({"key": "noise.0", "shape": [1, 4, 8, 12], "by": "pipeline_flux"},),
        "calls": {"transformer": 3},
        "step0": "denoiser.transformer.call0",
        "output_stride": 1,
        "tensors": tensors or {"noise.0": torch.ones(2, 4, 8, 12)},
    }
    return Case(**{**values, **changes})  # type: ignore[arg-type]


def request_of(transformer: dict[str, object] = GUIDED, **call: object) -> Request:
    return mapping_of("FluxPipeline").request(make_case({**CALL, **call}), transformer)


# ---- how a FLUX call becomes a request -----------------------------------------------------------


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


def test_a_generator_per_sample_is_a_seed_per_sample() -> None:
    request = request_of(prompt=["a", "b"], generator=[Seed(3), Seed(9)])
    assert request.runtime_config.seed == (3, 9)
    assert request.feeds is None


def test_given_latents_are_fed() -> None:
    latents = torch.zeros(1, 24, 16)
    request = request_of(latents=latents)
    assert request.feeds == {TensorKey.NOISE: latents}


@pytest.mark.parametrize("key", ["sigmas", "num_images_per_prompt", "guidence_scale"])
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
        f"denoiser.transformer.call{i}.{key}": torch.full((1,), float(i))
        for i in (0, 1)
        for key in ("in.encoder_hidden_states", "in.pooled_projections", "out")
    }
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


def test_only_known_classes_have_a_pipeline() -> None:
    assert has_pipeline("FluxPipeline")
    assert not has_pipeline("WanPipeline")
    with pytest.raises(InputError, match="no pipeline for WanPipeline"):
        mapping_of("WanPipeline")


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


# ---- distances -----------------------------------------------------------------------------------


def test_relative_error() -> None:
    assert relative_error(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf


def test_relative_error_accumulates_in_float64() -> None:
    expected = torch.full((2_000_000,), 1e-3)
    assert relative_error(expected * (1 + 2e-5), expected) == pytest.approx(2e-5, rel=1e-2)


def test_a_stage_has_the_error_of_its_worst_pair() -> None:
    a = torch.tensor([1.0])
    stage = compare("x", [("near", a, a), ("far", a * 1.01, a)], 1e-3)
    assert (stage.status, stage.note) == ("fail", "near, far")
    assert stage.error == pytest.approx(0.01, rel=1e-3)
    assert compare("x", [("near", a, a), ("far", a * 1.01, a)], 2e-2).status == "pass"


def test_the_largest_difference_counts_by_itself() -> None:
    expected = torch.ones(1000)
    got = expected.clone()
    got[7] += 0.003
    stage = compare("output", [("output", got, expected)], 1e-3, 2e-3)
    assert stage.error is not None and stage.error < 1e-3
    assert stage.status == "fail"
    assert compare("output", [("output", got, expected)], 1e-3, 4e-3).status == "pass"


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("side", ["got", "expected", "both"])
def test_non_finite_values_fail_on_either_side(value: float, side: str) -> None:
    bad, good = torch.tensor([1.0, value]), torch.tensor([1.0, 2.0])
    got, expected = bad if side != "expected" else good, bad if side != "got" else good
    stage = compare("latents", [("latents", got, expected)], 1e9)
    assert stage.status == "fail"
    assert "NaN" in stage.note


def test_shapes_must_agree() -> None:
    stage = compare("latents", [("latents", torch.ones(1, 3), torch.ones(3))], 1.0)
    assert stage.status == "fail"
    assert "[1, 3]" in stage.note and "[3]" in stage.note


# ---- cases on disk -------------------------------------------------------------------------------


def write_case(folder: Path, call: dict[str, object], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder.parent.parent / "model").mkdir(exist_ok=True)
    info = {
        "family": folder.parent.parent.name,
        "case": folder.name,
        "pipeline": "UnheardPipeline",
        "call": call,
        "draws": [],
        "calls": {},
        "step0": "denoiser.transformer.call0",
        "output_stride": 1,
    }
    (folder / "case.json").write_text(json.dumps(info, ensure_ascii=False), encoding="utf-8")
    save_file(tensors, folder / "reference.safetensors")
    return folder


def test_a_case_is_read_with_its_tensors_and_seeds(tmp_path: Path) -> None:
    call = {"prompt": "狐 🦊", "latents": {"$tensor": "input.latents"}, "generator": [{"$generator": 4}]}
    folder = write_case(tmp_path / "f" / "cases" / "base", call, {"input.latents": torch.ones(3)})
    case = read_case(folder)
    assert case.call["prompt"] == "狐 🦊"
    assert torch.equal(case.call["latents"], torch.ones(3))  # type: ignore[arg-type]
    assert case.call["generator"] == [Seed(4)]
    assert case.where == "f/base"
    with pytest.raises(CheckpointError, match="no tensor 'latents'"):
        case.tensor("latents")


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("[]", "expected an object"), ("{}", "'family' is missing")]
)
def test_a_damaged_case_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    folder = write_case(tmp_path / "f" / "cases" / "base", {}, {})
    (folder / "case.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"case\.json.*{message}"):
        read_case(folder)


def test_a_damaged_tensor_file_is_named(tmp_path: Path) -> None:
    folder = write_case(tmp_path / "f" / "cases" / "base", {}, {})
    (folder / "reference.safetensors").write_bytes(b"\x00" * 4)
    with pytest.raises(CheckpointError, match=r"reference\.safetensors"):
        read_case(folder)


def test_families_are_found_in_a_folder_and_as_a_folder(tmp_path: Path) -> None:
    for family in ("b", "a"):
        for name in ("odd", "base"):
            write_case(tmp_path / family / "cases" / name, {}, {})
    (tmp_path / "unrelated").mkdir()
    found = find_families(tmp_path)
    assert [(family.name, [path.name for path in family.cases]) for family in found] == [
        ("a", ["base", "odd"]),
        ("b", ["base", "odd"]),
    ]
    assert [family.name for family in find_families(tmp_path / "a")] == ["a"]
    assert [family.name for family in find_families(tmp_path, families=["b"])] == ["b"]
    assert [[path.name for path in family.cases] for family in find_families(tmp_path, cases=["odd"])] == [
        ["odd"],
        ["odd"],
    ]
    with pytest.raises(CheckpointMissingError, match="no folder"):
        find_families(tmp_path / "missing")


def test_a_call_with_unrecorded_inputs_is_left_out() -> None:
    prefix = "denoiser.transformer"
    tensors = {f"{prefix}.call{i}.{name}": torch.zeros(1) for i in (0, 1) for name in ("in.x", "in.big", "out")}
    assert [index for _, index, _ in recorded_calls(make_case({}, tensors))] == [0, 1]
    del tensors[f"{prefix}.call1.in.big"]
    assert [index for _, index, _ in recorded_calls(make_case({}, tensors))] == [0]


# ---- reports -------------------------------------------------------------------------------------


def report_of(*stages: StageReport) -> VerifyReport:
    case = CaseReport(family="f", case="base", pipeline="P", stages=stages, seconds=1.0)
    return VerifyReport(options=VerifyOptions(folder=Path("refs")), cases=[case])


GOOD = StageReport(name="latents", status="pass", error=1e-6, tolerance=1e-4)
BAD = StageReport(name="output", status="fail", error=math.inf, tolerance=1e-3)


def test_one_failed_stage_fails_and_a_missing_one_does_not_count() -> None:
    assert report_of(GOOD, not_available("output", "no pipeline")).passed
    assert not report_of(GOOD, BAD).passed
    assert not report_of(GOOD, failed("output", "died")).passed


def test_a_run_that_compared_nothing_did_not_pass() -> None:
    report = report_of(not_available("output", "no pipeline"))
    assert not report.passed
    assert (report.passes, report.failures) == (0, 0)
    assert not VerifyReport(options=VerifyOptions(folder=Path("refs"))).passed


def test_stage_lines() -> None:
    assert stage_line(GOOD).split() == ["latents", "1.0e-06", "<=", "1e-04", "pass"]
    assert stage_line(failed("output", "died")).split() == ["output", "fail", "died"]


def test_stages_missing_for_one_reason_share_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    missing = [not_available(name, "no pipeline") for name in ("latents", "output")]
    case = CaseReport(family="f", case="base", pipeline="P", stages=(GOOD, *missing), seconds=1.0)
    print_case(case)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "f/base (P, 1.0 s)"
    assert lines[1].endswith("pass")
    assert lines[2:] == ["  latents, output: not available: no pipeline"]


def test_json_is_strict_even_with_infinite_errors() -> None:
    data = json.loads(json.dumps(report_json(report_of(GOOD, BAD)), allow_nan=False))
    assert (data["passed"], data["num_failed"]) == (False, 1)
    stages = data["cases"][0]["stages"]
    assert [stage["error"] for stage in stages] == [1e-6, None]
    assert [stage["status"] for stage in stages] == ["pass", "fail"]


def test_summary_counts(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(report_of(GOOD, BAD))
    print_summary(VerifyReport(options=VerifyOptions(folder=Path("refs"), cases=("odd",))))
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["1 cases (single): 0 passed, 1 failed", "no case found in refs for case odd"]


def test_a_family_that_cannot_be_loaded_fails_and_leaves_the_others_alone(tmp_path: Path) -> None:
    tensors = {"denoiser.transformer.call0.in.x": torch.zeros(1), "denoiser.transformer.call0.out": torch.zeros(1)}
    write_case(tmp_path / "a" / "cases" / "base", {}, tensors)
    write_case(tmp_path / "b" / "cases" / "base", {}, tensors)
    config = tmp_path / "b" / "model" / "transformer" / "config.json"
    config.parent.mkdir()
    config.write_text('{"_class_name": "UnheardTransformer"}')
    seen: list[CaseReport] = []
    report = run_verify(VerifyOptions(folder=tmp_path), seen.append)
    assert seen == report.cases
    first, second = report.cases
    assert not first.passed and first.judged
    assert "config.json" in first.stages[0].note
    assert not second.judged
    assert second.stages[0].note.startswith("kdit has no network for the transformer")
