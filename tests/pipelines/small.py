"""Small requests of the tiny reference checkpoints, and damaged copies of these."""

from __future__ import annotations

import gc
import json
from pathlib import Path

from kdit import (
    Pipeline,
    PipelineRun,
    RuntimeConfig,
    SampleConfig,
    TensorKey,
)
from kdit.pipelines.result import GenerateResult

SMALL = SampleConfig(steps=2, max_sequence_length=12)


CFG = SampleConfig(steps=2, max_sequence_length=12, cfg_scale=2.0)


def make(pipe: Pipeline, prompt: str | list[str] = "a red fox", **changes: object) -> GenerateResult:
    arguments: dict[str, object] = dict(sample_config=SMALL, runtime_config=RuntimeConfig(seed=3, size=(32, 48)))
    return pipe.generate(prompt, **{**arguments, **changes})  # type: ignore[arg-type]


def start(pipe: Pipeline, prompt: str, *, hold: tuple[TensorKey, ...] = (), **changes: object) -> PipelineRun:
    """A run before its first step."""
    arguments: dict[str, object] = dict(sample_config=SMALL, runtime_config=RuntimeConfig(seed=3, size=(32, 48)))
    return pipe.begin(pipe.request(prompt, **{**arguments, **changes}), hold=hold)  # type: ignore[arg-type]


def runtime(**changes: object) -> RuntimeConfig:
    return RuntimeConfig(**{"seed": 3, "size": (32, 48), **changes})  # type: ignore[arg-type]


def drain(pipe: Pipeline) -> None:
    """Let the engine free what dropped pipelines and runs of earlier tests left."""
    gc.collect()
    pipe.engine.tensor_keys()


def damaged(dev_folder: Path, folder: Path, file: str, **changes: object) -> Path:
    """The checkpoint with changed entries in one of its JSON files."""
    for item in dev_folder.rglob("*"):
        if item.is_file():
            target = folder / item.relative_to(dev_folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(item)
    text = json.loads((folder / file).read_text())
    (folder / file).unlink()
    (folder / file).write_text(json.dumps({**text, **changes}))
    return folder
