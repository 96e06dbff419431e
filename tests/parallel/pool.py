"""Processes that run functions of the tests, each as one rank of a World over gloo. One pool per number of ranks."""

from __future__ import annotations

import atexit
import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.distributed as dist

from kdit.parallel.world import World

TIMEOUT = 60.0
_pools: dict[int, Pool] = {}


class RankError(AssertionError):
    """A function of a test failed on a rank; holds its traceback."""


class Pool:
    """``size`` processes that live until the tests end."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        meeting = str(Path(mkdtemp()) / "store")
        self._pipes: list[Connection] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            context.Process(target=_serve, args=(theirs, meeting, rank, size), daemon=True).start()
            self._pipes.append(ours)

    def run(self, function: Callable[..., object], *args: object) -> list[object]:
        """``function(world, *args)`` on every rank; its results in rank order. It must be importable."""
        for pipe in self._pipes:
            pipe.send((function, args))
        replies = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT):
                raise RankError(f"rank {rank} did not answer in {TIMEOUT} s")
            replies.append(pipe.recv())
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(replies) if not ok]
        if failed:
            raise RankError("\n".join(failed))
        return [value for _, value in replies]


def pool(size: int) -> Pool:
    """The pool of that many ranks."""
    if size not in _pools:
        _pools[size] = Pool(size)
        atexit.register(_pools.pop, size, None)
    return _pools[size]


def _serve(pipe: Connection, meeting: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT / 2)
    world = World(dist.FileStore(meeting, size), rank, size, device=torch.device("cpu"), timeout=timeout)
    generation = 0
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        world.sent.clear()
        try:
            reply: tuple[bool, object] = True, function(world, *args)
        except Exception:  # noqa: BLE001  the test that asked hears of it
            reply = False, traceback.format_exc()
        generation += 1
        world.renew(generation)
        pipe.send(reply)
