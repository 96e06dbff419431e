"""RuntimeConfig: what one request makes and where it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kdit.config.checks import all_are, is_pair, is_whole
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
        seeds = self.seed if isinstance(self.seed, tuple) else (0 if self.seed is None else self.seed,)
        if not seeds:
            raise ConfigError("RuntimeConfig.seed is an empty tuple; give one seed per sample, one int, or None")
        for seed in seeds:
            if not is_whole(seed, low=0, high=MAX_SEED):
                raise ConfigError(f"RuntimeConfig.seed must be a whole number from 0 to {MAX_SEED}, got {seed!r}")
        if self.size is not None and not is_pair(self.size):
            raise ConfigError(f"RuntimeConfig.size must be (width, height) in pixels, got {self.size!r}")
        if self.frame_num is not None and not is_whole(self.frame_num, low=1):
            raise ConfigError(f"RuntimeConfig.frame_num must be at least 1, got {self.frame_num!r}")
        if self.output_type not in get_args(OutputType):
            raise ConfigError(
                f"RuntimeConfig.output_type must be one of {', '.join(get_args(OutputType))}, got {self.output_type!r}"
            )
        if self.save_paths is not None and not all_are(self.save_paths, str):
            raise ConfigError(f"RuntimeConfig.save_paths must be a tuple of file names, got {self.save_paths!r}")
