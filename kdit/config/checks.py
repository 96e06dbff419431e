"""Checks of values that callers may have given with any type. Used by the config dataclasses."""

from __future__ import annotations

import math


def is_whole(value: object, *, low: int, high: int | None = None) -> bool:
    """Whether ``value`` is an int (True is none) of at least ``low`` and at most ``high``."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return low <= value and (high is None or value <= high)


def is_scale(value: object) -> bool:
    """Whether ``value`` is a finite number of at least 0."""
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value) and value >= 0


def is_pair(value: object) -> bool:
    """Whether ``value`` is a tuple or list of two ints of at least 1."""
    return isinstance(value, tuple | list) and len(value) == 2 and all(is_whole(n, low=1) for n in value)


def all_are(values: object, kind: type) -> bool:
    """Whether ``values`` is a tuple of instances of ``kind``."""
    return isinstance(values, tuple) and all(isinstance(value, kind) for value in values)
