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
from kdit.errors import CheckpointMissingError
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
