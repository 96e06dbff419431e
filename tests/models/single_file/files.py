"""Single files for tests, made of the reference families' weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kdit.models.checkpoint import Checkpoint
from kdit.models.single_file.file_component import locator, open_component
from kdit.models.weights.loading import load_network
from kdit.ops.opset import OpSet

WEIGHTS = "diffusion_pytorch_model.safetensors"


def network_tensors(model: Path, name: str = "transformer") -> dict[str, Tensor]:
    return load_file(model / name / WEIGHTS)


def write(path: Path, tensors: Mapping[str, Tensor], prefix: str = "") -> Path:
    save_file({prefix + name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def loaded(checkpoint: Checkpoint, name: str = "transformer", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Parameters of the network as LOAD_MODEL loads it: from the locator alone."""
    component = open_component(**locator(checkpoint.component(name)))  # type: ignore[arg-type]
    return load_network(component, dtype=dtype, device="cpu", ops=OpSet()).state_dict()


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
