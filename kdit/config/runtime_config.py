"""RuntimeConfig: what one request makes and where it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kdit.errors import ConfigError

OutputType = Literal["decoded", "latents"]
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """Size, seed and output of a request. None means "not given": the model's own default applies.

    ``seed``: sample i of a request uses ``seed + i``; a tuple gives each sample its own; None is drawn
    once and reported in the result. 0 is a seed like any other.
    """

    seed: int | tuple[int, ...] | None = None
    size: tuple[int, int] | None = None  # (width, height), pixels
    frame_num: int | None = None
    output_type: OutputType = "decoded"  # "latents" stops before the autoencoder
    save_paths: tuple[str, ...] | None = None  # one file per sample, written by the graph's save node

    def __post_init__(self) -> None:
        seeds = (self.seed,) if isinstance(self.seed, int) else (self.seed or ())
        if self.seed == ():
            raise ConfigError("RuntimeConfig.seed is an empty tuple; give one seed per sample, one int, or None")
        for seed in seeds:
            if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
                raise ConfigError(f"RuntimeConfig.seed must be a whole number from 0 to {MAX_SEED}, got {seed!r}")
        if self.size is not None:
            if len(self.size) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in self.size):
                raise ConfigError(f"RuntimeConfig.size must be (width, height) in pixels, got {self.size!r}")
        if self.frame_num is not None and (not isinstance(self.frame_num, int) or self.frame_num < 1):
            raise ConfigError(f"RuntimeConfig.frame_num must be at least 1, got {self.frame_num!r}")
        if self.output_type not in get_args(OutputType):
            raise ConfigError(
                f"RuntimeConfig.output_type must be one of {', '.join(get_args(OutputType))}, got {self.output_type!r}"
            )
