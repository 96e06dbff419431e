"""Progress of `kdit generate`: lines for pipes, a bar for terminals."""

import logging
import re
import sys
from io import StringIO

import pytest

from kdit.cli.messages import notes_on_stderr
from kdit.cli.progress import BarProgress, LineProgress, duration, open_progress


def test_plain_lines_come_once_per_tenth() -> None:
    stream = StringIO()
    progress = LineProgress(stream)
    progress.stage("loading mini")
    for done in range(1, 51):
        progress.step(done, 50, 0.5)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading mini"
    assert len(lines) == 11
    assert lines[1] == "step 5/50, 2.0 steps/s, 22.5 s left"
    assert lines[-1] == "step 50/50, 2.0 steps/s, 0.0 s left"


def test_few_steps_are_all_shown() -> None:
    stream = StringIO()
    progress = LineProgress(stream)
    for done in (1, 2, 3):
        progress.step(done, 3, 90.0)
    assert stream.getvalue().splitlines()[0] == "step 1/3, 90.0 s/step, 3 min 00 s left"
    assert len(stream.getvalue().splitlines()) == 3


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with open_progress(stream) as progress:
        assert isinstance(progress, BarProgress)
        progress.stage("loading mini")
        progress.step(1, 4, 0.5)
        progress.bar.refresh()
    assert "step 1/4, 2.0 steps/s, 1.5 s left" in stream.getvalue()


def test_a_note_has_a_line_of_its_own_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with notes_on_stderr(), open_progress() as progress:
        progress.step(1, 4, 0.5)
        logging.getLogger("kdit").warning("no effect")
        progress.step(2, 4, 0.5)
    rows = re.sub(r"\x1b\[2K", "\n", stream.getvalue())  # "erase this row": what was on it is gone
    rows = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", rows)
    assert rows.splitlines().count("kdit: note: no effect") == 1


def test_durations() -> None:
    assert [duration(s) for s in (0.04, 59.94, 59.96, 125, 3599.9, 3725)] == [
        "0.0 s",
        "59.9 s",
        "1 min 00 s",
        "2 min 05 s",
        "1 h 00 min",
        "1 h 02 min",
    ]
