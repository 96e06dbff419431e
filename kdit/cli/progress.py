"""Progress of a generation on stderr: a bar on a terminal, a plain line per tenth elsewhere. For cli/generate.py."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Progress(Protocol):
    """What a generation tells while it runs."""

    def stage(self, name: str) -> None:
        """A part without steps begins: loading, encoding, decoding."""

    def step(self, done: int, total: int, seconds: float) -> None:
        """``done`` of ``total`` denoising steps are done; the last one took ``seconds``."""


@contextmanager
def open_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """A Progress on ``stream`` (default: stderr), removed from the terminal when the block ends."""
    stream = stream or sys.stderr or io.StringIO()  # stderr is None where it was closed
    if not stream.isatty():
        yield LineProgress(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=30))
    with RichProgress(*columns, console=Console(file=stream), transient=True) as bar:
        yield BarProgress(bar)


class StepClock:
    """Adds up step times and words how far a loop is."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def tick(self, done: int, total: int, seconds: float) -> str:
        """The line after a step, as in ``step 3/24, 12.5 steps/s, 1.7 s left``."""
        self.seconds += seconds
        if self.seconds <= 0:
            return f"step {done}/{total}"
        rate = done / self.seconds
        return f"step {done}/{total}, {_rate(rate)}, {duration((total - done) / rate)} left"


class LineProgress:
    """Plain lines for files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.clock = StepClock()

    def stage(self, name: str) -> None:
        """One line per stage."""
        print(name, file=self.stream, flush=True)

    def step(self, done: int, total: int, seconds: float) -> None:
        """One line per tenth of the loop."""
        line = self.clock.tick(done, total, seconds)
        if done * 10 // total > (done - 1) * 10 // total:
            print(line, file=self.stream, flush=True)


class BarProgress:
    """A bar for terminals: pulsing in a stage, filling during the steps."""

    def __init__(self, bar: RichProgress) -> None:
        self.bar = bar
        self.clock = StepClock()
        self.task: TaskID = bar.add_task("starting", total=None)

    def stage(self, name: str) -> None:
        """Show the stage's name beside a pulsing bar."""
        self.bar.update(self.task, description=name, total=None)

    def step(self, done: int, total: int, seconds: float) -> None:
        """Show steps per second and the time left."""
        self.bar.update(self.task, description=self.clock.tick(done, total, seconds), total=total, completed=done)


def duration(seconds: float) -> str:
    """``1.7 s``, ``2 min 05 s``, ``1 h 02 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _rate(rate: float) -> str:
    return f"{rate:.1f} steps/s" if rate >= 1 else f"{1 / rate:.1f} s/step"
