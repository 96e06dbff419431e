"""Memory of a request: what cannot fit is refused before it has cost anything, what fits in parts runs in parts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from kdit.errors import InputError
from kdit.pipelines.generate_inputs import PipelineGenerateInputs

GIB = 2**30


def rows_that_fit(
    floor: Callable[[int], int], inputs: PipelineGenerateInputs, device: torch.device, *, pending: int
) -> int | None:
    """How many rows to compute in one forward: None for all, fewer where their memory is not free.

    ``floor``: bytes that a request needs at the very least with so many rows in one forward. ``pending``: bytes of
    weights that will be loaded before it runs. Raises InputError if
    even one row needs more than the device has.
    """
    total = device_memory(device)
    if floor(1) > total:
        width, height = inputs.runtime_config.size or (0, 0)
        frames = f", {inputs.runtime_config.frame_num} frames" if inputs.output_frames is not None else ""
        raise InputError(
            f"{inputs.num_samples} x {width}x{height}{frames} needs at least {floor(1) / GIB:.1f} GiB beside the "
            f"weights; {device} has {total / GIB:.1f} GiB in all"
        )
    free = free_memory(device) - pending
    fitting = [rows for rows in range(inputs.num_rows, 0, -1) if floor(rows) <= free]
    most = fitting[0] if fitting else 1
    return None if most == inputs.num_rows else most


def free_memory(device: torch.device) -> int:
    """Bytes that a device has free now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    stated = Path("/proc/meminfo")
    if stated.is_file():
        for line in stated.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return device_memory(device)


def device_memory(device: torch.device) -> int:
    """Bytes of memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
