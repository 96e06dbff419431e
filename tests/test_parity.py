"""kdit against recorded results of diffusers, case by case and stage by stage."""

import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from kdit.cli.main import app
from kdit.cli.verify.network_stage import NAME as NETWORK
from kdit.cli.verify.pipeline_stages import PIPELINE_STAGES, PREPARATION
from kdit.cli.verify.run import CaseReport, VerifyOptions, run_verify
from kdit.nodes.core.step_report import StepReport
from kdit.pipelines.pipeline import Pipeline
from kdit.pipelines.pipeline_run import PipelineRun

ReferenceFamily = Callable[[str], Path]
RUN = CliRunner()


def reports(folder: Path, *, batched: bool = False) -> list[CaseReport]:
    return run_verify(VerifyOptions(folder=folder, batched=batched)).cases


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True], ids=["single", "batch"])
@pytest.mark.parametrize(
    ("family", "cases"),
    [
        ("flux_dev", ["base", "odd", "true_cfg"]),
        ("flux_schnell", ["base", "odd", "true_cfg"]),
        ("flux_fill", ["base", "odd"]),
        ("flux_control", ["base", "odd"]),
        ("flux_kontext", ["auto_resize", "base", "no_image", "odd"]),
    ],
)
def test_flux_equals_diffusers(family: str, cases: list[str], batched: bool, reference_family: ReferenceFamily) -> None:
    found = reports(reference_family(family), batched=batched)
    assert [report.case for report in found] == cases
    for report in found:
        assert {stage.name: (stage.status, stage.note) for stage in report.stages if stage.status != "pass"} == {}
        assert [stage.name for stage in report.stages] == [NETWORK, *PIPELINE_STAGES]


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True], ids=["single", "batch"])
@pytest.mark.parametrize(
    ("family", "cases"), [("sd3_medium", ["base", "odd"]), ("sd35_medium", ["base", "odd", "skip_layer"])]
)
def test_sd3_equals_diffusers(family: str, cases: list[str], batched: bool, reference_family: ReferenceFamily) -> None:
    found = reports(reference_family(family), batched=batched)
    assert [report.case for report in found] == cases
    for report in found:
        assert {stage.name: (stage.status, stage.note) for stage in report.stages if stage.status != "pass"} == {}
        assert [stage.name for stage in report.stages] == [NETWORK, *PIPELINE_STAGES]


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True], ids=["single", "batch"])
@pytest.mark.parametrize(
    ("family", "cases"),
    [
        ("wan21_t2v", ["base", "image", "odd"]),
        ("wan21_i2v", ["base", "odd"]),
        ("wan21_flf2v", ["base"]),
        ("wan22_t2v_a14b", ["base", "odd"]),
        ("wan22_i2v_a14b", ["base", "odd_last_image"]),
        ("wan22_ti2v_5b", ["base", "odd"]),
        ("wan22_ti2v_5b_i2v", ["base", "odd"]),
    ],
)
def test_wan_equals_diffusers(family: str, cases: list[str], batched: bool, reference_family: ReferenceFamily) -> None:
    found = reports(reference_family(family), batched=batched)
    assert [report.case for report in found] == cases
    for report in found:
        assert {stage.name: (stage.status, stage.note) for stage in report.stages if stage.status != "pass"} == {}
        assert [stage.name for stage in report.stages] == [NETWORK, *PIPELINE_STAGES]


@pytest.mark.slow
def test_calls_of_the_wrong_expert_fail_the_schedule(tmp_path: Path, reference_family: ReferenceFamily) -> None:
    folder = tampered(reference_family("wan22_t2v_a14b"), tmp_path, lambda _: None)
    file = folder / "cases" / "odd" / "case.json"
    info = json.loads(file.read_text(encoding="utf-8"))
    calls = info["calls"]
    calls["transformer"], calls["transformer_2"] = calls["transformer"] - 2, calls["transformer_2"] + 2
    file.write_text(json.dumps(info), encoding="utf-8")
    assert failed_stages(folder, 1) == {"timesteps"}


@pytest.mark.slow
def test_several_images_per_prompt_equal_diffusers(tmp_path: Path, reference_family: ReferenceFamily) -> None:
    import tests.reference.families  # noqa: F401  (fills the registry)
    from tests.reference.case import run_case
    from tests.reference.folder import load_pipeline
    from tests.reference.registry import FAMILIES, Case

    model, family = reference_family("flux_schnell") / "model", tmp_path / "flux_schnell"
    call = {"prompt": ["a red fox", "two boats"], "num_images_per_prompt": 2, "height": 64, "width": 96}
    case = Case("copies", {**call, "num_inference_steps": 2, "max_sequence_length": 48})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of diffusers and transformers, about themselves
        run_case(load_pipeline(FAMILIES["flux_schnell"], model), FAMILIES["flux_schnell"], case, family / "cases" / "x")
    (family / "model").symlink_to(model, target_is_directory=True)
    (report,) = reports(family)
    assert {stage.name: (stage.status, stage.note) for stage in report.stages if stage.status != "pass"} == {}
    assert [stage.name for stage in report.stages] == [NETWORK, *PIPELINE_STAGES]


def tampered(family: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of ``family`` with one case, whose recorded tensors went through ``change``."""
    copy = folder / family.name
    shutil.copytree(family / "cases" / "odd", copy / "cases" / "odd")
    (copy / "model").symlink_to(family / "model", target_is_directory=True)
    file = copy / "cases" / "odd" / "reference.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return copy


def failed_stages(folder: Path, expected_exit: int) -> set[str]:
    result = RUN.invoke(app, ["verify", str(folder), "--json"])
    assert result.exit_code == expected_exit, result.output
    (case,) = json.loads(result.stdout)["cases"]
    return {stage["name"] for stage in case["stages"] if stage["status"] == "fail"}


@pytest.mark.slow
def test_a_reference_that_differs_fails(tmp_path: Path, reference_family: ReferenceFamily) -> None:
    family = reference_family("flux_schnell")

    def one_latent(tensors: dict[str, torch.Tensor]) -> None:
        index = int(tensors["latents"].abs().argmax())
        tensors["latents"].view(-1)[index] *= 1.01

    def not_a_number(tensors: dict[str, torch.Tensor]) -> None:
        tensors["output"].view(-1)[5] = float("nan")

    def embeddings(tensors: dict[str, torch.Tensor]) -> None:
        tensors["denoiser.transformer.call0.in.encoder_hidden_states"] *= 1.001

    def schedule(tensors: dict[str, torch.Tensor]) -> None:
        tensors["scheduler.timesteps"][1] += 0.1

    assert failed_stages(tampered(family, tmp_path / "same", lambda _: None), 0) == set()
    assert failed_stages(tampered(family, tmp_path / "latents", one_latent), 1) == {"latents"}
    assert failed_stages(tampered(family, tmp_path / "output", not_a_number), 1) == {"output"}
    assert failed_stages(tampered(family, tmp_path / "text", embeddings), 1) == {"prompt embeddings", NETWORK}
    assert failed_stages(tampered(family, tmp_path / "schedule", schedule), 1) == {"timesteps"}


@pytest.mark.slow
def test_an_argument_that_kdit_cannot_express_fails_its_case(tmp_path: Path, reference_family: ReferenceFamily) -> None:
    folder = tampered(reference_family("flux_schnell"), tmp_path, lambda _: None)
    file = folder / "cases" / "odd" / "case.json"
    info = json.loads(file.read_text(encoding="utf-8"))
    info["call"]["sigmas"] = [1.0, 0.5]
    file.write_text(json.dumps(info), encoding="utf-8")
    assert failed_stages(folder, 1) == {PREPARATION}


@pytest.mark.slow
def test_batch_mode_mixes_requests_at_other_steps(
    reference_family: ReferenceFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[tuple[int, int]]] = []
    step = Pipeline.step

    def spy(runs: Sequence[PipelineRun]) -> tuple[StepReport, ...]:
        seen.append([(run.num_steps - run.steps_left, run.num_steps) for run in runs])
        return step(runs)

    monkeypatch.setattr(Pipeline, "step", staticmethod(spy))
    options = VerifyOptions(folder=reference_family("flux_dev"), batched=True, cases=("base",))
    assert run_verify(options).passed
    assert seen == [
        [(0, 5)],
        [(1, 5)],
        [(2, 5), (0, 4)],
        [(3, 5), (1, 4), (0, 3)],
        [(4, 5), (2, 4), (1, 3)],
        [(3, 4), (2, 3)],
    ]


@pytest.mark.slow
def test_verify_prints_a_line_per_stage(reference_family: ReferenceFamily) -> None:
    result = RUN.invoke(app, ["verify", str(reference_family("flux_schnell")), "--case", "odd"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("flux_schnell/odd (FluxPipeline, ")
    assert all(" pass" in line for line in lines[1:-1])
    assert lines[0].endswith(": passed")
    assert len(lines) == 2 + 1 + len(PIPELINE_STAGES)
    assert lines[-1] == "1 cases (single): 1 passed, 0 failed"
