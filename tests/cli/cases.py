"""Reference cases that tests make up, in memory and on disk."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kdit.cli.verify.case import Case


def make_case(call: dict[str, object], tensors: dict[str, Tensor] | None = None, **changes: object) -> Case:
    values: dict[str, object] = {
        "family": "some_flux",
        "name": "base",
        "pipeline": "FluxPipeline",
        "call": call,
        "draws": ({"key": "noise.0", "shape": [1, 4, 8, 12], "by": "pipeline_flux"},),
        "calls": {"transformer": 3},
        "output_stride": 1,
        "tensors": tensors or {"noise.0": torch.ones(2, 4, 8, 12)},
    }
    return Case(**{**values, **changes})  # type: ignore[arg-type]


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
