"""RuntimeConfig: what one request makes and where it goes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, get_args

from kdit.config.checks import all_are, is_pair, is_whole
from kdit.config.file_options import FileOptions
from kdit.errors import ConfigError

OutputType = Literal["decoded", "latents"]
Fit = Literal["reject", "pad", "crop"]
MAX_FPS = 1000
BROADCAST_ROUNDING = Fraction(1, 200)  # people write 23.976 and 23.98 for 24000/1001
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """Size, seed and output of a request. None means "not given": the model's own default applies.

    ``seed``: sample i of a request uses ``seed + i``; a tuple gives each sample its own; None is drawn
    once and reported in the result. 0 is a seed like any other.

    ``fit``: what happens to a size or frame number that the model cannot make, and to input pictures of
    another shape. "reject": such a size is an error that names the nearest ones, and pictures are scaled to the
    size. "pad" and "crop": the next larger size is made and cut to what was asked for; a picture of another shape
    is scaled to lie inside the size ("pad") or to cover it ("crop").
    """

    seed: int | tuple[int, ...] | None = None
    size: tuple[int, int] | None = None  # (width, height), pixels
    frame_num: int | None = None
    fps: int | float | str | Fraction | None = None  # of a video file: 24, 23.976, "24000/1001"
    fit: Fit = "reject"
    output_type: OutputType = "decoded"  # "latents" stops before the autoencoder
    save_paths: tuple[str, ...] | None = None  # one file per sample, written by the graph's save node
    file_options: FileOptions = field(default_factory=FileOptions)  # how these files are encoded

    def __post_init__(self) -> None:
        seeds = self.seed if isinstance(self.seed, tuple) else (0 if self.seed is None else self.seed,)
        if not seeds:
            raise ConfigError("`RuntimeConfig.seed` is an empty tuple; give one seed per sample, one int, or None")
        for seed in seeds:
            if not is_whole(seed, low=0, high=MAX_SEED):
                raise ConfigError(f"`RuntimeConfig.seed` must be a whole number from 0 to {MAX_SEED}, got {seed!r}")
        if self.size is not None and not is_pair(self.size):
            raise ConfigError(f"`RuntimeConfig.size` must be (width, height) in pixels, got {self.size!r}")
        if self.frame_num is not None and not is_whole(self.frame_num, low=1):
            raise ConfigError(f"`RuntimeConfig.frame_num` must be at least 1, got {self.frame_num!r}")
        if self.fps is not None:
            frame_rate(self.fps)
        if self.fit not in get_args(Fit):
            raise ConfigError(f"`RuntimeConfig.fit` must be one of {', '.join(get_args(Fit))}, got {self.fit!r}")
        if self.output_type not in get_args(OutputType):
            known = ", ".join(get_args(OutputType))
            raise ConfigError(f"`RuntimeConfig.output_type` must be one of {known}, got {self.output_type!r}")
        if self.save_paths is not None and not all_are(self.save_paths, str):
            raise ConfigError(f"`RuntimeConfig.save_paths` must be a tuple of file names, got {self.save_paths!r}")
        if not isinstance(self.file_options, FileOptions):
            raise ConfigError(f"`RuntimeConfig.file_options` must be a FileOptions, got {self.file_options!r}")


def frame_rate(fps: int | float | str | Fraction) -> Fraction:
    """Frames per second as an exact ratio; 23.976, 29.97 and their like mean the broadcast rates n * 1000/1001.

    Raises ConfigError.
    """
    try:
        rate = Fraction(str(fps)) if isinstance(fps, float) else Fraction(fps)
    except (ValueError, TypeError, ZeroDivisionError, OverflowError):
        raise ConfigError(f'`fps` must be a number or a ratio such as "24000/1001", got {fps!r}') from None
    if isinstance(fps, bool) or not 0 < rate <= MAX_FPS:
        raise ConfigError(f"`fps` must be above 0 and at most {MAX_FPS}, got {fps!r}")
    broadcast = Fraction(math.ceil(rate) * 1000, 1001)
    return broadcast if rate.denominator != 1 and abs(rate - broadcast) < BROADCAST_ROUNDING else rate
