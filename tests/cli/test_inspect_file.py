"""`kdit inspect` of a single file: what it holds, and what has to come from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from kdit.cli.inspect import inspect_report, render
from kdit.cli.main import app
from tests.models.single_file import original_layout
from tests.models.single_file.files import network_tensors, write


def test_a_file_lists_what_it_lacks(reference_family: Callable[[str], Path], tmp_path: Path) -> None:
    tensors = original_layout.sd3(network_tensors(reference_family("sd35_medium") / "model"))
    half = {name: tensor.half().contiguous() for name, tensor in tensors.items()}
    save_file(half, tmp_path / "x.safetensors")
    report = inspect_report(tmp_path / "x.safetensors")
    assert report["family"] == "Stable Diffusion 3" and report["pipeline_class"] == "StableDiffusion3Pipeline"
    assert report["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert not report["ok"]
    (fault,) = report["faults"]
    assert "lacks text_encoder, text_encoder_2" in fault and "--components FOLDER" in fault
    sources = {source["name"]: source for source in report["sources"]}
    assert sources["text_encoder_3"]["state"] == "missing" and sources["transformer"]["state"] == "found"
    assert sources["vae"]["source"] == "--components vae=PATH"
    assert "vae             missing  " in render(report).replace("missing    ", "missing  ")
    network = report["components"][0]
    assert network["name"] == "transformer" and network["dtypes"] == {"F16": report["parameters"]}
    assert "NOT usable as it is" in render(report)


def test_components_from_elsewhere(reference_family: Callable[[str], Path], tmp_path: Path) -> None:
    model = reference_family("flux_dev") / "model"
    path = write(tmp_path / "x.safetensors", original_layout.flux(network_tensors(model)))
    alone = inspect_report(path)
    assert alone["family"] == "FLUX.1" and alone["memory"] is None
    assert alone["sources"][0]["state"] == "incomplete" and "axes_dims_rope" in alone["sources"][0]["source"]
    assert "axes_dims_rope is unknown" in alone["components"][0]["faults"][0]
    whole = inspect_report(path, components=model)
    assert whole["ok"] and whole["weight_hash"] and whole["memory"] is not None, whole["faults"]
    assert {source["state"] for source in whole["sources"]} == {"found"}
    wrong = inspect_report(path, components={"base": model, "vae": tmp_path})
    assert not wrong["ok"] and wrong["family"] == "FLUX.1"
    unread, lacks = wrong["faults"]  # the file by itself is shown
    assert "config.json" in unread and "lacks text_encoder" in lacks
    replaced = inspect_report(model, components={"transformer": path})
    assert replaced["ok"] and str(path) in replaced["sources"][0]["source"]
    useless = inspect_report(model, components=model)
    assert not useless["ok"] and "would supply nothing" in useless["faults"][0] and len(useless["components"]) == 7


def test_a_network_of_no_pipeline(reference_family: Callable[[str], Path], tmp_path: Path) -> None:
    tensors = original_layout.flux(network_tensors(reference_family("flux_dev") / "model"))
    tensors["img_in.weight"] = torch.cat([tensors["img_in.weight"], tensors["img_in.weight"][:, :8]], 1)
    report = inspect_report(write(tmp_path / "x.safetensors", tensors))
    assert not report["ok"] and report["family"] == "FLUX.1" and report["sources"] == []
    assert "24 channels in and 16 out" in report["faults"][0] and report["parameters"] > 0


def test_a_file_that_is_a_part(reference_family: Callable[[str], Path], tmp_path: Path) -> None:
    tensors = load_file(reference_family("flux_dev") / "model" / "text_encoder" / "model.safetensors")
    report = inspect_report(write(tmp_path / "clip.safetensors", tensors))
    assert not report["ok"] and report["family"] is None and report["part_of"] == ["FLUX.1"]
    (component,) = report["components"]
    assert component["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    text = render(report)
    assert "part of FLUX.1, no pipeline" in text and "no family" not in text
    assert "--components text_encoder=" in text and "transformer   missing" in text


def test_the_option_of_the_command(reference_family: Callable[[str], Path], tmp_path: Path) -> None:
    model = reference_family("flux_dev") / "model"
    path = write(tmp_path / "x.safetensors", original_layout.flux(network_tensors(model)))
    run = CliRunner().invoke
    whole = run(app, ["inspect", str(path), "--components", str(model), "--json"])
    assert whole.exit_code == 0 and json.loads(whole.stdout)["ok"]
    told = run(app, ["generate", "x", "--model", str(path), "-o", str(tmp_path / "x.png")])
    assert told.exit_code == 2 and not (tmp_path / "x.png").exists()
    error = next(i for i, line in enumerate(told.stderr.splitlines()) if line.startswith("kdit: error: "))
    table = [line.split()[:2] for line in told.stderr.splitlines()[error + 1 :]]
    assert ["transformer", "incomplete"] in table and ["text_encoder_2", "missing"] in table


def test_a_file_of_nothing_known(tmp_path: Path) -> None:
    save_file({"some.weight": torch.ones(2)}, tmp_path / "x.safetensors")
    report = inspect_report(tmp_path / "x.safetensors")
    assert not report["ok"] and report["components"] == []
    assert "no model that kdit knows; its 1 tensors are called some.weight" in report["faults"][0]
