"""Mesh: the named axes along which the ranks of a replica are arranged."""

from __future__ import annotations

from kdit.errors import ConfigError
from kdit.parallel.group import Group

AXES = ("dp", "cfg", "ring", "ulysses", "tp")  # outermost first
SEQUENCE_AXES = ("ring", "ulysses")  # tokens are split over these, ring outermost


class Mesh:
    """Groups by axis name. This one is a single rank: every group has size 1."""

    def group(self, *axes: str) -> Group:
        """The group of all ranks that differ from this one along ``axes`` only, in mesh order."""
        unknown = [axis for axis in axes if axis not in AXES]
        if unknown:
            raise ConfigError(f"unknown mesh axis {', '.join(unknown)}; known: {', '.join(AXES)}")
        return Group()
