"""PipelineGenerateInputs: one request after defaults were filled in and everything was checked."""

from __future__ import annotations

from dataclasses import dataclass

from kdit.config import CacheConfig, ExecuteConfig, RuntimeConfig, SampleConfig


@dataclass(frozen=True, kw_only=True)
class PipelineGenerateInputs:
    """What a ContextBuilder reads. ``prompts`` has one entry per sample."""

    prompts: tuple[str, ...]
    negative_prompts: tuple[str, ...] | None  # None: no guidance branch
    seeds: tuple[int, ...]  # one per sample
    sample_config: SampleConfig  # effective
    runtime_config: RuntimeConfig  # effective
    execute_config: ExecuteConfig
    cache_config: tuple[CacheConfig, ...] | None
    settings: dict[str, object]  # what the result and its files state

    @property
    def num_samples(self) -> int:
        """B."""
        return len(self.prompts)
