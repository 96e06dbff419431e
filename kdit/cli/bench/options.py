"""BenchOptions: what the command line asks `kdit bench compare` for. Made by bench/command.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kdit.config import DTYPES
from kdit.errors import ConfigError

PROMPT = "a red heart"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """None means "not given": the model's, or the shape's, own value."""

    model: str | None = None
    config: str | None = None  # a named shape or the file of one
    keep: Path | None = None
    rounds: int = 5
    fresh: int = 3  # fresh processes per side and kind; 0: none
    steps: int | None = None
    cfg: float | None = None
    size: tuple[int, int] | None = None
    frames: int | None = None
    max_sequence_length: int | None = None
    dtype: str = "float32"
    threads: int | None = None
    prompt: str = PROMPT
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.model is None) == (self.config is None):
            raise ConfigError("give either --model DIR or --config NAME, so that it is clear what is measured")
        if self.keep is not None and self.config is None:
            raise ConfigError("--keep is for --config: it says where the written model stays")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
