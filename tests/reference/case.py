"""Running one case and writing its folder."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import diffusers
import tokenizers
import torch
import transformers
from safetensors.torch import save_file

from tests.reference.call import call_arguments
from tests.reference.record import MAX_TENSOR, Record, flatten, recording
from tests.reference.registry import Case, Family
from tests.reference.run import run_full, run_latents


def _limited(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Large outputs keep every k-th pixel in height and width (the last axis is colour)."""
    stride = 1
    while tensor[..., ::stride, ::stride, :].numel() > MAX_TENSOR:
        stride += 1
    return (tensor[..., ::stride, ::stride, :] if stride > 1 else tensor).contiguous(), stride


def run_case(pipe: Any, spec: Family, case: Case, folder: Path) -> tuple[dict[str, Any], Record]:
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    arguments, described, inputs = call_arguments(case)
    with recording(pipe, spec) as record:
        results = run_full(pipe, spec, arguments)
    seconds = time.perf_counter() - start
    arguments, _, _ = call_arguments(case)  # fresh generator and inputs: some pipelines change their arguments
    final = run_latents(pipe, spec, arguments)

    tensors = {**inputs.tensors, **record.tensors, **final}
    strides: dict[str, int] = {}
    for name, value in results.items():
        for key, tensor in flatten(name, value):
            if key == "output" and tensor.ndim >= 4:
                tensor, strides[key] = _limited(tensor)
            tensors[key] = tensor.detach().clone().float().contiguous()
    scheduler = pipe.scheduler
    for name in ("timesteps", "sigmas"):
        if isinstance(getattr(scheduler, name, None), torch.Tensor):
            tensors[f"scheduler.{name}"] = getattr(scheduler, name).detach().clone()

    for file, image in inputs.images.items():
        image.save(folder / file)
    save_file({k: v.contiguous() for k, v in tensors.items()}, str(folder / "reference.safetensors"))
    first = spec.denoisers[0]
    if first not in record.counts:
        first = next(d for d in spec.denoisers if d in record.counts)
    info = {
        "family": spec.name,
        "case": case.name,
        "note": case.note,
        "pipeline": spec.pipeline,
        "dtype": "float32",
        "call": described,
        "draws": record.draws,
        "calls": record.counts,
        "step0": f"denoiser.{first}.call0",
        "output_stride": strides.get("output", 1),
        "seconds": round(seconds, 2),
        "versions": _versions(),
        "tensors": {key: _statistics(tensor) for key, tensor in tensors.items()},
    }
    (folder / "case.json").write_text(json.dumps(info, indent=1, ensure_ascii=False) + "\n")
    return info, record


def _statistics(tensor: torch.Tensor) -> dict[str, Any]:
    result: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    if tensor.numel() > 1:
        result["std"] = round(float(tensor.float().std()), 6)
    elif tensor.numel() == 1:
        result["value"] = float(tensor.float().reshape(()))
    return result


def _versions() -> dict[str, str]:
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }
