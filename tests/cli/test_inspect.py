"""inspect: what it says about whole, damaged and foreign folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kdit.cli.inspect import InspectReport, inspect_report, render
from kdit.cli.inspect_memory import MemoryQuestion
from kdit.errors import CheckpointMissingError, ConfigError, InputError
from kdit.models.checkpoint import Checkpoint
from tests.models.checkpoint_files import NETWORK_FILE, clone, edit_json, edit_tensors, overwrite, shard


@pytest.fixture
def folder(reference_family: Callable[[str], Path], tmp_path: Path) -> Path:
    return clone(reference_family("flux_dev") / "model", tmp_path / "model")


def faults(report: InspectReport) -> dict[str, list[str]]:
    return {component["name"]: component["faults"] for component in report["components"] if component["faults"]}


def test_whole_folder(folder: Path) -> None:
    report = inspect_report(folder)
    assert report["ok"] and report["supported"] and not report["faults"] and not faults(report)
    assert (report["family"], report["pipeline_class"]) == ("FLUX.1", "FluxPipeline")
    by_name = {component["name"]: component for component in report["components"]}
    expected = load_file(folder / "transformer" / NETWORK_FILE)
    count = sum(tensor.numel() for tensor in expected.values())
    transformer = by_name["transformer"]
    assert transformer["class_name"] == "FluxTransformer2DModel" and transformer["files"] == [NETWORK_FILE]
    assert (transformer["parameters"], transformer["bytes"], transformer["dtypes"]) == (
        count,
        4 * count,
        {"F32": count},
    )
    assert by_name["scheduler"]["parameters"] == 0 and by_name["scheduler"]["status"] == "ok"
    total = sum(component["parameters"] for component in report["components"])
    assert report["weight_bytes"] == {"stored": 4 * total, "float32": 4 * total, "bfloat16": 2 * total}
    assert report["weight_hash"] == Checkpoint.open(folder).weight_hash()
    assert json.loads(json.dumps(report)) == report


def test_built_in_model() -> None:
    report = inspect_report("mini")
    text = render(report)
    assert report["ok"] and report["name"] == "mini" and report["weight_hash"]
    for part in (report["version"], report["weight_hash"], *report["attribution"], "FLUX.1", "BF16"):
        assert part and part in text
    assert report["attribution"] and text.endswith("\nok")


def test_mixed_dtypes_and_shards(folder: Path) -> None:
    edit_tensors(
        folder / "vae" / NETWORK_FILE,
        lambda tensors: tensors.update({"decoder.conv_in.bias": tensors["decoder.conv_in.bias"].half()}),
    )
    names = shard(folder / "vae")
    vae = next(component for component in inspect_report(folder)["components"] if component["name"] == "vae")
    assert vae["files"] == names and vae["dtypes"].keys() == {"F32", "F16"}
    assert f"{len(names)} files" in render(inspect_report(folder))


def test_every_fault_is_listed(folder: Path) -> None:
    shutil.rmtree(folder / "tokenizer_2")
    shards = shard(folder / "text_encoder_2", "model")
    (folder / "text_encoder_2" / shards[0]).unlink()
    overwrite(folder / "text_encoder_2" / shards[1], b"")
    (folder / "vae" / "config.json").unlink()
    overwrite(folder / "vae" / NETWORK_FILE, (folder / "vae" / NETWORK_FILE).read_bytes()[:-8])
    overwrite(folder / "kdit.json", b'{"defaults": {"stepz": 1}}')
    report = inspect_report(folder)
    found = faults(report)
    assert found.keys() == {"tokenizer_2", "text_encoder_2", "vae"}
    assert "there is no folder" in found["tokenizer_2"][0]
    assert shards[0] in found["text_encoder_2"][0] and "is empty (0 bytes)" in found["text_encoder_2"][1]
    assert "config.json is missing" in found["vae"][0] and "is truncated" in found["vae"][1]
    assert len(report["faults"]) == 1 and "'stepz'" in report["faults"][0]
    assert not report["ok"] and report["weight_hash"] is None
    text = render(report)
    assert all(f"! {fault}" in text for fault in (*report["faults"], *(f for fs in found.values() for f in fs)))
    assert text.splitlines()[-1].startswith("NOT usable")


def test_tensors_that_our_network_lacks(folder: Path) -> None:
    edit_tensors(
        folder / "transformer" / NETWORK_FILE,
        lambda tensors: tensors.update(ghost=torch.ones(1), ghoul=tensors.pop("proj_out.bias")),
    )
    (message,) = faults(inspect_report(folder))["transformer"]
    assert "1 of " in message and "proj_out.bias" in message and "ghost, ghoul" in message


@pytest.mark.parametrize(
    ("file", "changes", "told"),
    [
        ("model_index.json", {"vae": [None, None]}, "has no component 'vae'"),
        ("model_index.json", {"scheduler": [None, None]}, "has no component 'scheduler'"),
        ("scheduler/scheduler_config.json", {"_class_name": "NopeScheduler"}, "'NopeScheduler' is no scheduler"),
        ("scheduler/scheduler_config.json", {"_class_name": "DDIMScheduler"}, "takes no sigmas"),
        ("vae/config.json", {"scaling_factor": "x"}, "scaling_factor must be a number"),
        ("tokenizer_2/tokenizer.json", {"model": 3}, "component tokenizer_2"),
    ],
)
def test_what_the_pipeline_would_refuse(folder: Path, file: str, changes: dict[str, object], told: str) -> None:
    edit_json(folder / file, **changes)
    report = inspect_report(folder)
    assert not report["ok"] and any(told in fault for fault in report["faults"]), report["faults"]


def test_pipeline_that_kdit_does_not_have(folder: Path) -> None:
    edit_json(folder / "model_index.json", _class_name="SomeonesPipeline")
    report = inspect_report(folder)
    assert not report["ok"] and not report["supported"] and not faults(report)
    assert "'SomeonesPipeline'; kdit has pipelines for FluxPipeline" in report["faults"][0]
    assert report["family"] == "FLUX.1"  # its network is known


@pytest.mark.parametrize("content", [None, b"{", b'{"_class_name": "FluxPipeline", "vae": ["diffusers"]}'])
def test_folder_without_a_usable_index(folder: Path, content: bytes | None) -> None:
    (folder / "model_index.json").unlink()
    if content is not None:
        overwrite(folder / "model_index.json", content)
    report = inspect_report(folder)
    assert not report["ok"] and report["pipeline_class"] is None and report["family"] == "FLUX.1"
    assert "model_index.json" in report["faults"][0]
    assert [c["name"] for c in report["components"]] == ["text_encoder", "text_encoder_2", "transformer", "vae"]
    assert "model_index.json" in render(report)


def test_empty_folder(tmp_path: Path) -> None:
    report = inspect_report(tmp_path)
    assert not report["ok"] and report["components"] == [] and report["weight_hash"] is None
    assert "it holds nothing" in render(report)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissingError, match="there is no model folder"):
        inspect_report(tmp_path / "nowhere")


def test_a_variant_and_left_over_shards_are_told(folder: Path) -> None:
    (folder / "vae" / NETWORK_FILE).rename(folder / "vae" / "diffusion_pytorch_model.fp16.safetensors")
    shard(folder / "transformer", num_shards=3)
    extra = folder / "transformer" / "diffusion_pytorch_model-00002-of-00002.safetensors"
    overwrite(extra, (folder / "transformer" / "diffusion_pytorch_model-00001-of-00003.safetensors").read_bytes())
    report = inspect_report(folder)
    assert report["ok"]
    by_name = {component["name"]: component for component in report["components"]}
    assert by_name["vae"]["variant"] == "fp16" and by_name["transformer"]["variant"] is None
    assert extra.name in by_name["transformer"]["notices"][0] and extra.name not in by_name["transformer"]["files"]
    text = render(report)
    assert "variant fp16" in text and f"{extra.name} is not read" in text


def test_memory_of_a_request(folder: Path) -> None:
    report = inspect_report(folder)
    small = report["memory"]
    assert small is not None and small["fits"] and small["device"] == "cpu"
    parameters = {component["name"]: component["parameters"] for component in report["components"]}
    assert small["weights"] == {name: 4 * count for name, count in parameters.items() if count}
    assert small["total"] == sum(small["weights"].values()) + small["activations"]
    question = MemoryQuestion(size=(64, 96), batch=3, cfg=4.0, dtype="bfloat16")
    asked = inspect_report(folder, question)["memory"]
    assert asked is not None
    assert (asked["size"], asked["batch"], asked["rows"], asked["dtype"]) == ([64, 96], 3, 6, "bfloat16")
    assert 2 * sum(asked["weights"].values()) == sum(small["weights"].values())
    larger = inspect_report(folder, MemoryQuestion(size=(128, 192), batch=3, cfg=4.0, dtype="bfloat16"))["memory"]
    assert larger is not None and larger["activations"] == 4 * asked["activations"]
    huge = inspect_report(folder, MemoryQuestion(size=(1 << 20, 1 << 20)))
    assert huge["ok"] and huge["memory"] is not None and not huge["memory"]["fits"]
    assert "TOO LARGE" in render(huge)


@pytest.mark.parametrize(
    ("question", "error", "told"),
    [
        (MemoryQuestion(size=(17, 31)), InputError, "multiples of 16"),
        (MemoryQuestion(frames=5), InputError, "makes single pictures"),
        (MemoryQuestion(dtype="float8"), ConfigError, "dtype must be one of"),
        (MemoryQuestion(device="tpu"), ConfigError, "tpu"),
    ],
)
def test_questions_without_an_answer(folder: Path, question: MemoryQuestion, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        inspect_report(folder, question)


def test_memory_of_a_damaged_checkpoint_is_not_estimated(folder: Path) -> None:
    shutil.rmtree(folder / "tokenizer")
    report = inspect_report(folder)
    assert report["memory"] is None and "activations" not in render(report)


def test_optional_components_that_are_missing(reference_family: Callable[[str], Path], tmp_path: Path) -> None:
    whole = inspect_report(reference_family("sd3_medium") / "model")
    assert whole["ok"] and whole["missing_optional"] == []
    folder = clone(reference_family("sd3_medium") / "model", tmp_path / "sd3")
    edit_json(folder / "model_index.json", text_encoder_3=[None, None], tokenizer_3=[None, None])
    report = inspect_report(folder)
    assert report["ok"], report["faults"]
    assert report["missing_optional"] == ["text_encoder_3"] and "without text_encoder_3 (optional)" in render(report)


def test_a_video_model_with_an_image_processor(reference_family: Callable[[str], Path]) -> None:
    report = inspect_report(reference_family("wan21_i2v") / "model", MemoryQuestion(size=(64, 48), frames=9))
    assert report["ok"], report["faults"]
    assert report["memory"] is not None and report["memory"]["frames"] == 9
    assert "9 frames" in render(report)
