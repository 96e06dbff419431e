"""PipelineDefaults: what applies where a request says nothing, and what sizes can be made at all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PipelineDefaults:
    """The family states them for a checkpoint; its kdit.json overrides single fields."""

    size: tuple[int, int]  # (width, height)
    size_multiple: int
    max_side: int | None = None  # pixels; None: no limit
    steps: int
    guidance_scale: float | None  # None: the network has no embedded guidance
    cfg_scale: float
    strength: float | None = None  # of an image that is given; None: the pipeline changes no image
    has_second_expert: bool = False
    cfg_scale_2: float | None = None  # of the second expert, where a request states no cfg_scale; None: cfg_scale
    max_sequence_length: int
    min_sequence_length: int = 1
    max_sequence_limit: int
    frame_num: int | None = None  # None: single pictures
    frame_step: int = 1  # a video has a multiple of this many frames, and one
    fps: int | None = None
