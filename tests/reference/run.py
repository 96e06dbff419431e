"""Calling a pipeline to its final latents or to its decoded output."""

from __future__ import annotations

from typing import Any

import torch

from tests.reference.registry import Family


def run_latents(pipe: Any, spec: Family, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Run without decoding and return the final latents by name."""
    if spec.modular:
        return _run_modular(pipe, arguments, ["latents", "audio_latents"])
    result = pipe(**{**arguments, "output_type": "latent"}, return_dict=False)
    names = ["latents", "audio_latents"]
    return {name: value for name, value in zip(names, result, strict=False) if isinstance(value, torch.Tensor)}


def _run_modular(pipe: Any, arguments: dict[str, Any], outputs: list[str]) -> dict[str, Any]:
    state = pipe(**arguments)
    return {name: state.get(name) for name in outputs}


def run_full(pipe: Any, spec: Family, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run to the decoded output: ``output`` (images, video or audio) and, where there is one, ``audio``."""
    if spec.modular:
        result = _run_modular(pipe, arguments, ["videos", "audio"])
        return {"output": result["videos"], "audio": result["audio"]}
    result = pipe(**{**arguments, "output_type": "np"}, return_dict=False)
    return dict(zip(["output", "audio"], result, strict=False))
