"""`kdit bench compare` on models of a few thousand weights."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from kdit.cli.bench import compare
from kdit.cli.bench.call import BenchCall, reference_arguments
from kdit.cli.bench.clock import Sample
from kdit.cli.bench.compare import run_compare
from kdit.cli.bench.fresh import Job, Side, Task, measure
from kdit.cli.bench.machine import machine_description, peak_memory_bytes
from kdit.cli.bench.options import BenchOptions
from kdit.cli.bench.ours import OwnSide, resident_bytes
from kdit.cli.bench.report import render
from kdit.cli.bench.shape import parse_shape, read_shape, shape_names
from kdit.cli.bench.weights import write_model
from kdit.cli.main import app
from kdit.errors import CheckpointMissingError, ConfigError, InputError, KditError

CALL = BenchCall(
    pipeline="FluxPipeline",
    prompt="a fox",
    negative=None,
    steps=1,
    cfg_scale=1.0,
    cfg_scale_2=None,
    guidance_scale=3.5,
    max_sequence_length=16,
    size=(64, 64),
    frames=None,
    seed=0,
)
TINY = tuple(name for name in shape_names() if name.endswith("-tiny"))


def quiet(_line: str) -> None:
    pass


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "flux-tiny"
    write_model(read_shape("flux-tiny"), folder, "bfloat16")
    return folder


def test_there_is_a_tiny_shape_for_every_large_one() -> None:
    def pipelines(tiny: bool) -> set[str]:
        return {read_shape(name).pipeline for name in shape_names() if (name in TINY) is tiny}

    assert pipelines(tiny=True) == pipelines(tiny=False) == {"FluxPipeline", "StableDiffusion3Pipeline", "WanPipeline"}


@pytest.mark.parametrize(("name", "billions"), [("flux-1.2b", 1.17), ("wan-1.3b", 1.42), ("sd35-medium", 2.47)])
def test_the_large_shapes_have_the_stated_sizes(name: str, billions: float) -> None:
    import diffusers

    config = dict(read_shape(name).configs["transformer"])
    with torch.device("meta"):
        model = getattr(diffusers, str(config["_class_name"])).from_config(config)
    assert sum(t.numel() for t in model.state_dict().values()) / 1e9 == pytest.approx(billions, abs=0.006)


@pytest.mark.parametrize("name", TINY)
def test_a_written_model_runs_in_both_libraries_with_one_result(name: str) -> None:
    numbers = run_compare(BenchOptions(config=name, rounds=1, fresh=0), quiet)
    assert numbers["agree"] is True
    assert numbers["difference.latents.relative"] < 1e-4  # type: ignore[operator]
    for stage in ("text_encode", "loop", "decode", "total"):
        own, reference = (numbers[f"{side}.{stage}.median_s"] for side in ("kdit", "diffusers"))
        assert isinstance(own, float) and isinstance(reference, float)
        assert numbers[f"ratio.{stage}"] == pytest.approx(own / reference)
        assert own > 0 and reference > 0


def test_the_stages_of_each_side_fill_its_total() -> None:
    numbers = run_compare(BenchOptions(config="flux-tiny", rounds=2, fresh=0, cfg=2.0), quiet)
    assert numbers["call.negative"] == ""
    for side in ("kdit", "diffusers"):
        text, loop, decode, total = (
            numbers[f"{side}.{stage}.all_s"] for stage in ("text_encode", "loop", "decode", "total")
        )
        assert isinstance(text, list) and isinstance(loop, list) and isinstance(decode, list)
        assert isinstance(total, list) and len(total) == 2
        for parts, whole in zip(zip(text, loop, decode, strict=True), total, strict=True):
            assert 0.5 * whole < sum(parts) <= whole
    assert 0 < numbers["kdit.loop_resident_ratio"] <= 1  # type: ignore[operator]


def test_weights_are_of_the_dtype_finite_and_the_same_every_time(tiny: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    write_model(read_shape("flux-tiny"), again, "bfloat16")
    for part in ("transformer", "vae"):
        name = f"{part}/diffusion_pytorch_model.safetensors"
        assert (tiny / name).read_bytes() == (again / name).read_bytes()
        with safe_open(tiny / name, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
        assert all(tensor.numel() == 1 or tensor.float().std() > 0 for tensor in tensors.values())


def test_large_tensors_are_continued_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    from kdit.cli.bench import weights

    monkeypatch.setattr(weights, "POOL_SIZE", 7)
    pieces = list(weights._values("a.weight", (4, 5), torch.randn(7), is_norm=False))
    flat = torch.cat(pieces)
    assert flat.shape == (20,)
    assert torch.equal(flat[7:14], flat[:7])


def test_residence_counts_what_has_storage() -> None:
    side = OwnSide("mini", "bfloat16")
    (network,) = (m for m in side.pipeline.engine.executors[0].models() if hasattr(m, "prepare_mod"))
    before, whole = resident_bytes([network])  # type: ignore[list-item]
    assert whole == sum(p.numel() for p in network.parameters()) * 2  # type: ignore[attr-defined]
    network.img_out.to("meta")  # type: ignore[attr-defined]
    after, still = resident_bytes([network])  # type: ignore[list-item]
    assert still == whole
    assert before - after == 2 * (256 * 64 + 64)
    side.pipeline.close()


def test_a_difference_is_told_and_ends_with_1(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    honest = compare.ReferenceSide.run

    def wrong(self: compare.ReferenceSide, call: BenchCall) -> Sample:
        sample = honest(self, call)
        return replace(sample, latents=sample.latents + 1)

    monkeypatch.setattr(compare.ReferenceSide, "run", wrong)
    arguments = ["bench", "compare", "--model", str(tiny), "--rounds", "1", "--no-fresh", "--steps", "1"]
    result = CliRunner().invoke(app, [*arguments, "--size", "32x32", "--max-sequence-length", "8"])
    assert result.exit_code == 1
    assert "NOT THE SAME RESULT" in result.stdout


def test_the_command_writes_once_and_keeps_what_it_is_told_to(tmp_path: Path) -> None:
    arguments = ["bench", "compare", "--config", "flux-tiny", "--keep", str(tmp_path), "--rounds", "1", "--no-fresh"]
    first = CliRunner().invoke(app, [*arguments, "--json", "--dtype", "bfloat16", "--threads", "1"])
    assert first.exit_code == 0, first.output
    numbers = json.loads(first.stdout)
    assert numbers["machine.threads"] == 1 and numbers["dtype"] == "bfloat16"
    assert numbers["call.size"] == [64, 64] and numbers["call.steps"] == 2
    (folder,) = tmp_path.iterdir()
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    written = weights.stat().st_mtime_ns
    second = CliRunner().invoke(app, [*arguments, "--dtype", "bfloat16", "--steps", "1"])
    assert second.exit_code == 0, second.output
    assert f"using the model in {folder}" in second.stderr
    assert weights.stat().st_mtime_ns == written
    assert "ratio" in second.stdout and "loop" in second.stdout


def test_nothing_is_left_without_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_compare(BenchOptions(config="flux-tiny", rounds=1, fresh=0, steps=1), quiet)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("side", "task"), [("kdit", "picture"), ("diffusers", "load")])
def test_fresh_processes_measure(side: Side, task: Task, tiny: Path, tmp_path: Path) -> None:
    from PIL import Image

    output = tmp_path / "first.png"
    job = Job(side=side, task=task, model=str(tiny), dtype="bfloat16", threads=1, output=str(output), call=CALL)
    found = measure(job)
    if task == "load":
        assert 0 < found["load"] <= found["load_touch"]
    else:
        assert found["first_picture"] > 0.2 and found["peak_memory"] > 100 << 20
        with Image.open(output) as picture:
            assert picture.size == (64, 64)


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    job = Job(side="kdit", task="picture", model=str(tmp_path), dtype="float32", threads=1, output="", call=CALL)
    with pytest.raises(KditError, match=r"picture process of kdit ended with 1.*model_index\.json"):
        measure(job)


def test_a_job_survives_its_way_to_the_process() -> None:
    job = Job(side="kdit", task="load", model="m", dtype="float32", threads=1, output="o", call=CALL)
    assert Job.from_json(json.dumps(asdict(job))) == job


def test_each_family_has_the_reference_names() -> None:
    guided = replace(CALL, negative="", cfg_scale=4.0)
    assert reference_arguments(CALL)["true_cfg_scale"] == 1.0
    assert "negative_prompt" not in reference_arguments(CALL)
    assert reference_arguments(guided)["negative_prompt"] == ""
    assert reference_arguments(replace(guided, pipeline="StableDiffusion3Pipeline"))["guidance_scale"] == 4.0
    video = reference_arguments(replace(guided, pipeline="WanPipeline", frames=5, cfg_scale_2=3.0))
    assert (video["guidance_scale"], video["guidance_scale_2"], video["num_frames"]) == (4.0, 3.0, 5)
    with pytest.raises(InputError, match=r"FluxPipeline.*got FluxFillPipeline"):
        reference_arguments(replace(CALL, pipeline="FluxFillPipeline"))


def test_the_reference_takes_these_arguments() -> None:
    import inspect

    import diffusers

    for pipeline in ("FluxPipeline", "StableDiffusion3Pipeline", "WanPipeline"):
        call = replace(CALL, pipeline=pipeline, negative="", frames=5, cfg_scale_2=2.0)
        taken = inspect.signature(getattr(diffusers, pipeline).__call__).parameters
        assert set(reference_arguments(call)) | {"callback_on_step_end", "output_type", "generator"} <= set(taken)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--model DIR or --config"),
        ({"model": "mini", "config": "flux-tiny"}, "--model DIR or --config"),
        ({"model": "mini", "keep": Path("x")}, "--keep is for --config"),
        ({"model": "mini", "dtype": "int8"}, "--dtype must be one of"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchOptions(**options)  # type: ignore[arg-type]


def test_shape_files_are_checked(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissingError, match=r"no such file.*flux-tiny"):
        read_shape("flux-9000b")
    for data, message in (
        ({"pipelin": "x"}, "unknown entries pipelin"),
        ({"pipeline": "FluxPipeline"}, "expected 'pipeline'"),
        ({"pipeline": "FluxPipeline", "components": {"vae": {}}}, "'vae' has no _class_name"),
        ({"pipeline": "P", "components": {}, "tokenizers": {"tokenizer": "bpe"}}, "expected clip or t5"),
        ({"pipeline": "P", "components": {}, "run": 3}, "'run' must be an object"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_shape("mine", data, "mine.json")
    own = tmp_path / "mine.json"
    own.write_text((compare.read_shape.__globals__["SHAPES"] / "flux-tiny.json").read_text())
    assert read_shape(str(own)).configs == read_shape("flux-tiny").configs


def test_a_shape_that_cannot_be_built_says_which_part(tmp_path: Path) -> None:
    shape = read_shape("flux-tiny")
    broken = {**shape.configs, "transformer": {**shape.configs["transformer"], "num_layers": "two"}}
    with pytest.raises(ConfigError, match="transformer: FluxTransformer2DModel cannot be built"):
        write_model(replace(shape, configs=broken), tmp_path / "m", "float32")


def test_the_machine_is_described() -> None:
    described = machine_description(3)
    assert described["machine.threads"] == 3
    assert described["machine.torch"] == torch.__version__ and described["machine.cpu"]
    json.dumps(described, allow_nan=False)
    before = peak_memory_bytes()
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert peak_memory_bytes() >= before
    assert held.numel() < peak_memory_bytes()


def test_the_table_has_a_line_for_every_stage() -> None:
    numbers: dict[str, object] = {
        "model": "m", "dtype": "float32", "call.pipeline": "P", "call.size": (64, 32), "call.frames": 5,
        "call.steps": 2, "call.cfg_scale": 4.0, "machine.cpu": "c", "machine.threads": 2, "machine.cores": 2,
        "machine.features": ["avx2"], "machine.torch": "2", "machine.diffusers": "0", "machine.commit": None,
        "agree": True, "difference.latents.relative": 0.0, "difference.latents.largest": 0.0,
        "kdit.loop_resident_ratio": 0.7,
    }  # fmt: skip

    def stages(name: str) -> dict[str, object]:
        return {
            f"ratio.{name}": 0.5, f"ratio.{name}.low": 0.4, f"ratio.{name}.high": 0.6,
            f"kdit.{name}.median_s": 1.0, f"diffusers.{name}.median_s": 2.0,
        }  # fmt: skip

    numbers |= stages("loop") | stages("first_picture")
    numbers |= {"ratio.peak_memory": 0.9, "ratio.peak_memory.low": 0.9, "ratio.peak_memory.high": 0.9}
    numbers |= {"kdit.peak_memory.median_bytes": 9 << 20, "diffusers.peak_memory.median_bytes": 10 << 20}
    text = render(numbers)
    assert "64x32, 5 frames" in text and "commit" not in text
    for line in ("loop                 1.000 s     2.000 s   0.500   0.400 to 0.600", "9 MiB      10 MiB"):
        assert line in text
    assert math.isclose(float(text.split("loop: ")[1].split()[0]), 0.7)
