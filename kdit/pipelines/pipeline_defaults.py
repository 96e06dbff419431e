"""PipelineDefaults: what applies where a request says nothing. The family states them, a kdit.json overrides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PipelineDefaults:
    """What applies where a request says nothing. A checkpoint's kdit.json overrides single fields."""

    size: tuple[int, int]  # (width, height)
    size_multiple: int
    steps: int
    guidance_scale: float | None  # None: the network has no embedded guidance
    cfg_scale: float
    max_sequence_length: int
    max_sequence_limit: int
