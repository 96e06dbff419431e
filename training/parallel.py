"""Data-parallel training over one-thread processes.

On a CPU this beats threads inside one process for small models: there is one synchronisation per step instead of
thousands, which matters most when other programs want the cores too.
"""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _worker(rank: int, world: int, port: int, fn, args) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        fn(rank, world, args)
    finally:
        if world > 1:
            dist.destroy_process_group()


def launch(world: int, fn, args) -> None:
    """Run ``fn(rank, world, args)`` in ``world`` processes (in this one when it is 1)."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    if world == 1:
        _worker(0, 1, port, fn, args)
    else:
        mp.spawn(_worker, (world, port, fn, args), nprocs=world)


@torch.no_grad()
def average(tensors: list[torch.Tensor], world: int) -> None:
    """Replace each tensor by its mean over the processes (one message)."""
    if world > 1:
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        flat /= world
        for t, new in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(new.view_as(t))


def agree(value: float, world: int) -> float:
    """Rank 0's value, on every rank."""
    if world > 1:
        box = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(box, 0)
        return box.item()
    return value
