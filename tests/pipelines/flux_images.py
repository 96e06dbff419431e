"""Small requests with images to the tiny FLUX.1 checkpoints."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kdit import Pipeline, RuntimeConfig, SampleConfig
from kdit.pipelines.context_builders.flux import FluxTextInputs
from kdit.pipelines.result import GenerateResult

SIZE = (48, 32)


def make(pipe: Pipeline, extra: FluxTextInputs | None, **changes: object) -> GenerateResult:
    """A small request; ``changes`` are of the sample config, ``prompt``, and of the runtime config."""
    runtime: dict[str, object] = {"seed": 3, "size": SIZE}
    sample: dict[str, object] = {"steps": 2, "max_sequence_length": 12}
    prompt = changes.pop("prompt", "a red fox")
    feeds = changes.pop("feeds", None)
    for name, value in changes.items():
        (runtime if name in ("seed", "size", "fit", "output_type") else sample)[name] = value
    return pipe.generate(
        prompt,  # type: ignore[arg-type]
        sample_config=SampleConfig(**sample),  # type: ignore[arg-type]
        runtime_config=RuntimeConfig(**runtime),  # type: ignore[arg-type]
        extra_inputs=extra,
        feeds=feeds,  # type: ignore[arg-type]
    )


def levels(result: GenerateResult) -> np.ndarray:
    """8-bit pixels of all samples."""
    assert result.pixels is not None
    return np.asarray((result.pixels * 255).round().to(torch.uint8))


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())
