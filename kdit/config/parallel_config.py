"""ParallelConfig: how many ranks share the work along each axis."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kdit.config.checks import is_whole
from kdit.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Sizes of the parallel axes: dp x cfg x ring x ulysses x tp ranks in all, tp innermost.

    ``vae`` and ``text_encoder_tp`` are sub-groups and must divide the number of ranks.
    """

    dp: int = 1  # replicas
    cfg: int = 1  # branches of classifier-free guidance
    tp: int = 1  # tensor parallel
    ulysses: int = 1  # sequence parallel over heads
    ring: int = 1  # sequence parallel over keys
    vae: int = 1
    text_encoder_tp: int = 1

    def __post_init__(self) -> None:
        for item in fields(self):
            size = getattr(self, item.name)
            if not is_whole(size, low=1):
                raise ConfigError(f"ParallelConfig.{item.name} must be at least 1, got {size!r}")
        if self.cfg > 2:
            raise ConfigError(f"ParallelConfig.cfg must be 1 or 2, got {self.cfg}")
        for name in ("vae", "text_encoder_tp"):
            if self.world_size % getattr(self, name):
                raise ConfigError(
                    f"ParallelConfig.{name} = {getattr(self, name)} does not divide the {self.world_size} ranks"
                )

    @property
    def world_size(self) -> int:
        """Number of ranks that the axes multiply to."""
        return self.dp * self.cfg * self.tp * self.ulysses * self.ring
