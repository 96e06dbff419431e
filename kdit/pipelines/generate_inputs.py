"""PipelineGenerateInputs: one request after defaults were filled in and everything was checked."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kdit.config import CacheConfig, ExecuteConfig, RuntimeConfig, SampleConfig
from kdit.pipelines.extra_inputs import ExtraInputs


@dataclass(frozen=True, kw_only=True)
class PipelineGenerateInputs:
    """What a ContextBuilder reads. ``prompts`` has one entry per sample."""

    prompts: tuple[str, ...]
    negative_prompts: tuple[str, ...] | None  # None: no guidance branch
    seeds: tuple[int, ...]  # one per sample
    sample_config: SampleConfig  # effective
    runtime_config: RuntimeConfig  # effective; its size and frame_num are what the network makes
    output_size: tuple[int, int]  # what the result has: cut from what is made
    output_frames: int | None  # None: single pictures
    fps: Fraction | None
    execute_config: ExecuteConfig
    cache_config: tuple[CacheConfig, ...] | None
    extra_inputs: ExtraInputs | None
    settings: dict[str, object]  # what the result and its files state
    rows_per_forward: int | None = None  # None: all samples and branches in one forward

    @property
    def num_samples(self) -> int:
        """B."""
        return len(self.prompts)

    @property
    def num_rows(self) -> int:
        """Samples times guidance branches."""
        return self.num_samples * (1 if self.negative_prompts is None else 2)
