"""ComponentRow: one line of what is told about a model from several places: found or missing, and who supplies it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FOUND, INCOMPLETE, MISSING, LEFT_OUT, PUBLISHED = "found", "incomplete", "missing", "left out", "published"


class ComponentRow(NamedTuple):
    """``source``: where it was found, or what would supply it."""

    name: str
    state: str
    source: str


def missing_row(name: str, optional: bool) -> ComponentRow:
    """A component that must be given; or be left out on purpose, where that is possible."""
    return ComponentRow(name, MISSING, f"--components {name}=PATH" + (f", or {name}=none" if optional else ""))


def render(rows: Sequence[ComponentRow]) -> str:
    """The rows as lines of text."""
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"  {row.name.ljust(widths[0])}  {row.state.ljust(widths[1])}  {row.source}" for row in rows)
