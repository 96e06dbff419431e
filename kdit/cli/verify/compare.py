"""Distances between kdit's tensors and recorded ones, judged against a tolerance. Used by verify/run.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kdit.errors import KditError

Status = Literal["pass", "fail", "not available"]


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """One compared stage of a case. Errors are None where nothing could be compared."""

    name: str
    status: Status
    error: float | None = None  # relative, |a - b|_2 / |b|_2
    tolerance: float | None = None
    largest: float | None = None  # largest absolute difference
    largest_tolerance: float | None = None
    note: str = ""


def relative_error(got: Tensor, expected: Tensor) -> float:
    """|got - expected|_2 / |expected|_2 over the whole tensors, accumulated in float64."""
    a, b = got.double(), expected.double()
    distance, norm = float((a - b).norm()), float(b.norm())
    if norm == 0:
        return 0.0 if distance == 0 else float("inf")
    return distance / norm


def compare(
    name: str,
    pairs: list[tuple[str, Tensor, Tensor]],
    tolerance: float,
    largest_tolerance: float | None = None,
) -> StageReport:
    """Judge (what, got, expected) pairs as one stage; its error is that of the worst pair.

    Fails on a shape that differs and on NaN or infinity on either side.
    """
    worst, largest = 0.0, 0.0
    for what, got, expected in pairs:
        a, b = got.detach().cpu().float(), expected.detach().cpu().float()
        problem = _problem(a, b)
        if problem:
            return StageReport(name=name, status="fail", tolerance=tolerance, note=f"{what}: {problem}")
        worst = max(worst, relative_error(a, b))
        if b.numel():
            largest = max(largest, float((a - b).abs().max()))
    near = worst <= tolerance and (largest_tolerance is None or largest <= largest_tolerance)
    return StageReport(
        name=name,
        status="pass" if near else "fail",
        error=worst,
        tolerance=tolerance,
        largest=largest,
        largest_tolerance=largest_tolerance,
        note="" if len(pairs) == 1 else ", ".join(what for what, _, _ in pairs),
    )


def failed(name: str, note: str) -> StageReport:
    """A stage that could not be reached."""
    return StageReport(name=name, status="fail", note=note)


def not_available(name: str, note: str) -> StageReport:
    """A stage that does not count, because kdit or the recording lacks what it needs."""
    return StageReport(name=name, status="not available", note=note)


@contextmanager
def errors_fail(stages: list[StageReport], names: Sequence[str]) -> Iterator[None]:
    """The boundary around one case: an error inside ends the block and fails the first of ``names`` not in ``stages``.

    Only KeyboardInterrupt and SystemExit pass.
    """
    try:
        yield
        return
    except KditError as error:
        note = str(error)
    except Exception as error:  # noqa: BLE001  (a case may break torch, a library or kdit; the others still count)
        note = f"{type(error).__name__}: {error}"
    reached = {stage.name for stage in stages}
    name = next((name for name in names if name not in reached), names[-1])
    stages.append(failed(name, " ".join(note.split())))


def _problem(got: Tensor, expected: Tensor) -> str:
    if got.shape != expected.shape:
        return f"shape {list(got.shape)}, expected {list(expected.shape)}"
    for side, tensor in (("kdit's", got), ("the recorded", expected)):
        if not bool(torch.isfinite(tensor).all()):
            return f"NaN or infinity in {side} tensor"
    return ""
