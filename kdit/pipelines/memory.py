"""check_memory: refuses a request that cannot fit, before it has cost anything."""

from __future__ import annotations

import os

import torch

from kdit.errors import InputError
from kdit.pipelines.generate_inputs import PipelineGenerateInputs

GIB = 2**30


def check_memory(floor: int, inputs: PipelineGenerateInputs, device: torch.device) -> None:
    """Raise InputError if ``floor`` bytes, which the request needs at the very least, are more than the device has."""
    total = device_memory(device)
    if floor > total:
        width, height = inputs.runtime_config.size or (0, 0)
        raise InputError(
            f"{inputs.num_samples} x {width}x{height} needs at least {floor / GIB:.1f} GiB beside the weights; "
            f"{device} has {total / GIB:.1f} GiB in all"
        )


def device_memory(device: torch.device) -> int:
    """Bytes of memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
