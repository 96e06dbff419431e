"""Settings of the step caches. A family that has no hook for one refuses it before loading."""

from __future__ import annotations

from dataclasses import dataclass

from kdit.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """Base of all step-cache settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstBlockCacheConfig(CacheConfig):
    """Reuse the rest of the stack while the first block's residual changes little."""

    residual_diff_threshold: float = 0.12
    downsample_factor: int = 1

    def __post_init__(self) -> None:
        if self.residual_diff_threshold < 0:
            raise ConfigError(f"residual_diff_threshold must be at least 0, got {self.residual_diff_threshold}")
        if self.downsample_factor < 1:
            raise ConfigError(f"downsample_factor must be at least 1, got {self.downsample_factor}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TeaCacheConfig(CacheConfig):
    """Reuse the whole stack while the accumulated change of its modulated input stays small."""

    threshold: float = 0.25

    def __post_init__(self) -> None:
        if self.threshold < 0:
            raise ConfigError(f"threshold must be at least 0, got {self.threshold}")


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridCacheConfig(FirstBlockCacheConfig):
    """First-block decision, Taylor prediction instead of plain reuse."""

    order: int = 1

    def __post_init__(self) -> None:
        FirstBlockCacheConfig.__post_init__(self)
        if self.order not in (1, 2):
            raise ConfigError(f"order must be 1 or 2, got {self.order}")
