"""DeviceInfo: where one rank computes. The Executor puts it into the NodeContext that a node sees."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceInfo:
    """Devices and position of one rank."""

    compute_device: torch.device
    offload_device: torch.device
    rank_id: int
    world_size: int
