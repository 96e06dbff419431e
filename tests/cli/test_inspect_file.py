"""`kdit inspect` of a single file: what it holds, and what has to come from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from kdit.cli.inspect import inspect_report, render
from tests.models.single_file import original_layout
from tests.models.single_file.files import network_tensors


def test_a_file_lists_what_it_lacks(reference_family: Callable[[str], Path], tmp_path: Path) -> None:
    tensors = original_layout.sd3(network_tensors(reference_family("sd35_medium") / "model"))
    half = {name: tensor.half().contiguous() for name, tensor in tensors.items()}
    save_file(half, tmp_path / "x.safetensors")
    report = inspect_report(tmp_path / "x.safetensors")
    assert report["family"] == "Stable Diffusion 3" and report["pipeline_class"] == "StableDiffusion3Pipeline"
    assert report["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert not report["ok"]
    (fault,) = report["faults"]
    assert "text_encoder_3  missing" in fault and "--components vae=PATH" in fault
    network = report["components"][0]
    assert network["name"] == "transformer" and network["dtypes"] == {"F16": report["parameters"]}
    assert "NOT usable as it is" in render(report)


def test_a_file_of_nothing_known(tmp_path: Path) -> None:
    save_file({"some.weight": torch.ones(2)}, tmp_path / "x.safetensors")
    report = inspect_report(tmp_path / "x.safetensors")
    assert not report["ok"] and report["components"] == []
    assert "no model that kdit knows; its 1 tensors are called some.weight" in report["faults"][0]
