"""flow_shift: how far a flow schedule is shifted for the size of a picture. Families with such schedules call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast


def flow_shift(config: Mapping[str, object], num_tokens: int, *, max_shift: float) -> float:
    """mu for ``num_tokens`` image tokens: a line through the two points that the scheduler's ``config`` states
    (Esser et al. 2024, section 5.3.2). ``max_shift``: of the second point, where the config lacks it.
    """

    def number(key: str, default: float) -> float:
        return float(cast(float, config.get(key, default)))

    least, most = number("base_image_seq_len", 256), number("max_image_seq_len", 4096)
    base = number("base_shift", 0.5)
    slope = (number("max_shift", max_shift) - base) / (most - least)
    return num_tokens * slope + base - slope * least
