import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from kdit.cli.main import app
from kdit.cli.verify.case import Seed, find_families, read_case
from kdit.cli.verify.compare import StageReport, compare, errors_fail, failed, not_available, relative_error
from kdit.cli.verify.network_stage import NAME as NETWORK
from kdit.cli.verify.network_stage import NetworkStage, recorded_calls
from kdit.cli.verify.report import print_case, print_summary, report_json, stage_line
from kdit.cli.verify.run import CaseReport, VerifyOptions, VerifyReport, run_verify
from kdit.errors import CheckpointError, CheckpointMissingError, InputError
from tests.cli.cases import make_case, write_case

RUN = CliRunner()


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
    assert lines[0] == "f/base (P, 1.0 s): passed"
    assert lines[1].endswith("pass")
    assert lines[2:] == ["  latents, output: not available: no pipeline"]


def test_a_case_of_the_network_alone_passes_and_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    network = StageReport(name=NETWORK, status="pass", error=1e-6, tolerance=1e-5)
    only = report_of(network, not_available("latents", "no pipeline"))
    more = report_of(network, GOOD)
    for report in (only, more, report_of(failed(NETWORK, "died")), report_of(not_available(NETWORK, "no network"))):
        print_case(report.cases[0])
    print_summary(VerifyReport(options=only.options, cases=[*only.cases, *more.cases]))
    lines = capsys.readouterr().out.splitlines()
    verdicts = [line.partition(": ")[2] for line in lines if line.startswith("f/base")]
    assert verdicts == ["passed (network only)", "passed", "failed", "not available"]
    assert lines[-1] == "2 cases (single): 2 passed (1 of them network only), 0 failed"
    data = report_json(only)
    assert (data["passed"], data["num_passed"], data["num_network_only"]) == (True, 1, 1)
    assert report_json(more)["num_network_only"] == 0


def test_json_is_strict_even_with_infinite_errors() -> None:
    data = json.loads(json.dumps(report_json(report_of(GOOD, BAD)), allow_nan=False))
    assert (data["passed"], data["num_failed"]) == (False, 1)
    stages = data["cases"][0]["stages"]
    assert [stage["error"] for stage in stages] == [1e-6, None]
    assert [stage["status"] for stage in stages] == ["pass", "fail"]


def test_summary_counts(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(report_of(GOOD, BAD))
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["1 cases (single): 0 passed, 1 failed"]


# ---- what goes wrong -----------------------------------------------------------------------------


def test_an_error_fails_the_first_stage_that_was_not_reached() -> None:
    stages = [GOOD]
    with errors_fail(stages, ("latents", "output")):
        raise RuntimeError("size of tensor a (3)\n must match")
    with errors_fail(stages, ("latents", "output")):
        raise InputError("too late")
    assert stages[1:] == [
        failed("output", "RuntimeError: size of tensor a (3) must match"),
        failed("output", "too late"),
    ]
    for passing in (KeyboardInterrupt, SystemExit):
        with pytest.raises(passing), errors_fail(stages, ("latents",)):
            raise passing


FORWARD = {"denoiser.transformer.call0.in.x": torch.zeros(1), "denoiser.transformer.call0.out": torch.zeros(1)}


def families(folder: Path) -> Path:
    """Families a and b, each with the case base and a network that kdit knows by name."""
    for name in ("a", "b"):
        write_case(folder / name / "cases" / "base", {}, FORWARD)
        config = folder / name / "model" / "transformer" / "config.json"
        config.parent.mkdir()
        config.write_text('{"_class_name": "FluxTransformer2DModel"}')
    return folder


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes\ndiffer"), AssertionError("ours"), KeyError("k"), MemoryError()]
)
def test_any_error_in_one_family_leaves_the_other_judged(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(stage: NetworkStage, *_: object) -> tuple[Tensor, Tensor]:
        if stage.model.parent.name == "a":
            raise error
        return torch.zeros(1), torch.zeros(1)

    monkeypatch.setattr(NetworkStage, "_forward", forward)
    result = RUN.invoke(app, ["verify", str(families(tmp_path)), "--json"])
    assert result.exit_code == 1, result.output
    first, second = json.loads(result.stdout)["cases"]
    assert (first["passed"], second["passed"]) == (False, True)
    assert first["stages"][0]["note"] == f"{type(error).__name__}: {' '.join(str(error).split())}".strip()


def test_ctrl_c_ends_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: object) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(NetworkStage, "_forward", forward)
    result = RUN.invoke(app, ["verify", str(families(tmp_path))])
    assert (result.exit_code, result.stderr) == (130, "kdit: interrupted\n")


@pytest.mark.parametrize(("pipeline", "status"), [("FluxPipeline", "fail"), ("UnheardPipeline", "not available")])
def test_what_a_network_cannot_be_given_counts_only_with_a_pipeline(
    pipeline: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: object) -> Tensor:
        raise InputError("tokens of this kind are not supported yet")

    monkeypatch.setattr(NetworkStage, "_forward", forward)
    folder = families(tmp_path) / "a"
    info = folder / "cases" / "base" / "case.json"
    info.write_text(info.read_text(encoding="utf-8").replace("UnheardPipeline", pipeline), encoding="utf-8")
    (case,) = run_verify(VerifyOptions(folder=folder)).cases
    assert (case.stages[0].name, case.stages[0].status) == (NETWORK, status)
    assert case.stages[0].note == "tokens of this kind are not supported yet"
    assert case.judged == (status == "fail")


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
