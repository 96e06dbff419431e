"""A gate as a step cache would be one: skips the rows it is told to and hands out what it recorded before."""

from __future__ import annotations

import torch
from torch import Tensor

from kdit.models.rows import Rows, Streams
from kdit.parallel import Group


class ReplayGate:
    """Skips the rows in ``skip`` between its taps; they come back as they were recorded at ``replayed``."""

    def __init__(self, taps: tuple[int, ...], skip: set[int], replayed: Streams) -> None:
        self.taps, self.skip, self.replayed = taps, skip, replayed
        self.recorded: list[tuple[int, tuple[int, ...], bool]] = []  # position, rows, whether text was there

    def record(self, tap: int, x: Streams, rows: Rows) -> None:
        assert x.img.shape[0] == len(rows.index)
        self.recorded.append((tap, rows.index, x.txt is not None))

    def decide(self, tap: int, x: Streams, rows: Rows, vote: Group) -> Tensor:
        assert tap == self.taps[0] and vote.size == 1
        return torch.tensor([i not in self.skip for i in rows.index])

    def reuse(self, tap: int, x: Streams, rows: Rows) -> Streams:
        index = list(rows.index)
        txt = None if self.replayed.txt is None else self.replayed.txt[index]
        return Streams(self.replayed.img[index], txt)
