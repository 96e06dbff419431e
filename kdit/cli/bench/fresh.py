"""Measures in processes of their own: loading, the first picture, peak memory. Used by bench/compare.py.

`python -m kdit.cli.bench.fresh JOB` is such a process; it prints one JSON object per event.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kdit.cli.bench.call import BenchCall
from kdit.cli.bench.machine import peak_memory_bytes
from kdit.errors import KditError

if TYPE_CHECKING:
    from torch import Tensor

Side = Literal["kdit", "diffusers"]
Task = Literal["load", "picture"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process does."""

    side: Side
    task: Task
    model: str
    dtype: str
    threads: int
    output: str  # where the picture goes
    call: BenchCall

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse of ``json.dumps(asdict(job))``."""
        data = json.loads(text)
        call = data.pop("call")
        return cls(**data, call=BenchCall(**{**call, "size": tuple(call["size"])}))


def measure(job: Job) -> dict[str, float]:
    """Run ``job`` in a process of its own.

    Of the task ``load``: ``load`` and ``load_touch``, seconds. Of ``picture``: ``first_picture``, seconds from the
    start of the process until the file is there, and ``peak_memory``, bytes.
    """
    command = [sys.executable, "-m", "kdit.cli.bench.fresh", json.dumps(asdict(job))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads), "HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    found: dict[str, float] = {}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            event = json.loads(line)
            if event.pop("saved", False):
                event["first_picture"] = time.perf_counter() - started
            found |= event
        complaint = process.stderr.read()
    if process.returncode:
        reason = (complaint.strip().splitlines() or ["no message"])[-1]
        raise KditError(f"the {job.task} process of {job.side} ended with {process.returncode}: {reason}")
    return found


def _main(job: Job) -> None:
    if job.side == "kdit":
        from kdit import Pipeline as Pipeline  # each side imports torch through its own door
    else:
        import diffusers

        getattr(diffusers, job.call.pipeline)
    import torch

    torch.set_num_threads(job.threads)
    work: dict[Task, Callable[[Job], None]] = {"load": _load, "picture": _picture}
    work[job.task](job)


def _load(job: Job) -> None:
    """Loading alone: what both sides import is imported before."""
    import diffusers

    from kdit.pipelines.pipeline import Pipeline

    getattr(diffusers, job.call.pipeline)
    started = time.perf_counter()
    if job.side == "kdit":
        from kdit.cli.bench.ours import open_pipeline, own_weights

        pipeline: Pipeline = open_pipeline(job.model, job.dtype)
        pipeline.load_models()
        loaded = time.perf_counter()
        _touch(own_weights(pipeline))
    else:
        from kdit.cli.bench.reference import load_reference, reference_weights

        reference = load_reference(Path(job.model), job.call.pipeline, job.dtype)
        loaded = time.perf_counter()
        _touch(reference_weights(reference))
    _tell(load=loaded - started, load_touch=time.perf_counter() - started)


def _touch(tensors: list[Tensor]) -> None:
    """Read every value, so that what a library only mapped is in memory."""
    for tensor in tensors:
        tensor.sum()


def _picture(job: Job) -> None:
    """From nothing to a picture in a file; of a video the first frame."""
    if job.side == "kdit":
        from kdit.cli.bench.ours import make_request, open_pipeline

        pipeline = open_pipeline(job.model, job.dtype)
        request = make_request(pipeline, job.call)
        pipeline.load_models()
        result = pipeline.run(request)
        pixels = result.pixels if result.video is None else result.video
        assert pixels is not None, "a decoded request has pixels"
    else:
        from kdit.cli.bench.reference import call_reference, load_reference

        pixels = call_reference(load_reference(Path(job.model), job.call.pipeline, job.dtype), job.call)
    from PIL import Image

    frame = pixels.reshape(-1, *pixels.shape[-3:])[0]
    Image.fromarray((frame.clamp(0, 1) * 255).round().byte().numpy()).save(job.output)
    _tell(saved=True, peak_memory=peak_memory_bytes())


def _tell(**event: float) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    _main(Job.from_json(sys.argv[1]))
