"""The memory estimate of ``kdit inspect``: what a request of a given size needs at least, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch

from kdit.config import ExecuteConfig, ParallelConfig, RuntimeConfig, SampleConfig
from kdit.engine.engine import Engine
from kdit.models.checkpoint import Checkpoint
from kdit.models.weights.component_folder import ComponentKind
from kdit.pipelines.family_pipeline import FamilyPipeline
from kdit.pipelines.memory import device_memory, free_memory
from kdit.pipelines.options import check_execute_config
from kdit.pipelines.request import make_inputs, with_checkpoint_defaults


@dataclass(frozen=True, kw_only=True)
class MemoryQuestion:
    """The request whose memory is estimated. None: the model's own default."""

    size: tuple[int, int] | None = None  # (width, height)
    frames: int | None = None
    batch: int = 1
    cfg: float | None = None
    dtype: str = "float32"
    device: str = "cpu"


class MemoryReport(TypedDict):
    """Bytes; JSON-able."""

    size: list[int]
    frames: int | None
    batch: int
    rows: int  # of one forward: samples times guidance branches
    dtype: str
    weights: dict[str, int]  # by component, loaded in ``dtype``
    activations: int  # of the loop or the decoder, whichever is larger, at the very least
    total: int
    device: str
    device_total: int
    device_free: int
    fits: bool  # ``total`` is no more than the device has in all


def memory_report(checkpoint: Checkpoint, family: FamilyPipeline, question: MemoryQuestion) -> MemoryReport:
    """Weights of all components at once, and ``FamilyPipeline.memory_floor`` beside them.

    Raises InputError for a size or number of frames that the model cannot make, UnsupportedOptionError for a dtype
    that it does not have, and ConfigError for a device that is not there.
    """
    execute = ExecuteConfig(dtype=question.dtype)
    check_execute_config(family.network, execute)
    inputs, _ = make_inputs(
        with_checkpoint_defaults(family.defaults(checkpoint), checkpoint),
        execute,
        [""] * question.batch,
        None,
        SampleConfig(cfg_scale=question.cfg),
        RuntimeConfig(size=question.size, frame_num=question.frames, seed=0),
        {},
        network=family.network,
        output=family.output,
    )
    itemsize = getattr(torch, question.dtype).itemsize
    weights = {
        name: component.open_weights().num_parameters * itemsize
        for name, component in checkpoint.components.items()
        if component.kind is ComponentKind.MODEL
    }
    activations = family.memory_floor(checkpoint, inputs, inputs.num_rows)
    device = Engine.single(question.device, ParallelConfig()).executors[0].device_info.compute_device
    total = sum(weights.values()) + activations
    return MemoryReport(
        size=list(inputs.runtime_config.size or ()),
        frames=inputs.runtime_config.frame_num,
        batch=question.batch,
        rows=inputs.num_rows,
        dtype=question.dtype,
        weights=weights,
        activations=activations,
        total=total,
        device=question.device,
        device_total=device_memory(device),
        device_free=free_memory(device),
        fits=total <= device_memory(device),
    )


def memory_lines(report: MemoryReport) -> list[str]:
    """The estimate as text."""
    width, height = report["size"]
    frames = "" if report["frames"] is None else f", {report['frames']} frames"
    lines = [f"memory in {report['dtype']} for {report['batch']} x {width}x{height}{frames}, {report['rows']} rows:"]
    rows = [*report["weights"].items(), ("activations", report["activations"]), ("together", report["total"])]
    width_of_names = max(len(name) for name, _ in rows)
    at_least = ("activations", "together")
    for name, size in rows:
        lines.append(f"  {name.ljust(width_of_names)}  {'at least ' if name in at_least else ''}{readable(size)}")
    device = f"{report['device']} has {readable(report['device_total'])}, {readable(report['device_free'])} of it free"
    lines.append(f"  {device}: {'it may fit' if report['fits'] else 'TOO LARGE for it'}")
    return lines


def readable(count: int) -> str:
    """Bytes in the unit that suits."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
