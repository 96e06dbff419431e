"""What a GENERATE node hands to the runner: models, tensors and settings of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kdit.config import ExecuteConfig, SampleConfig
from kdit.errors import InputError
from kdit.keys import ModelKey, RunId
from kdit.models.network import Network

ImageEmbeds = Tensor
"""One tensor, dim 0 = B."""

MultiPromptImageEmbeds = list[Tensor]
"""One tensor per prompt, each with its own sizes."""


@dataclass
class BaseLatent:
    """The main latent; ``latent.shape[1:]`` is the shape of the noise and of the result."""

    latent: Tensor  # [B, C, (F,) H, W]
    mask: Tensor | None = None  # image-to-video families only: [B, c, F, H, W], which frames are given


@dataclass
class AuxLatent:
    """Reference, control or mask latents; the family's handler decides how they act."""

    latent: ImageEmbeds | MultiPromptImageEmbeds
    indices: tuple[tuple[int, ...], ...] | None = None
    """For each sample, the positions of its own tensors in the list; None: see ``of_samples``."""

    def of_samples(self, num_samples: int) -> tuple[tuple[int, ...], ...]:
        """For each sample, the positions of its own tensors; by default one for each, or one for all.

        Raises InputError if the list has other lengths.
        """
        held = len(self.latent)
        if self.indices is not None:
            assert len(self.indices) == num_samples and all(i < held for own in self.indices for i in own)
            return self.indices
        if held not in (1, num_samples):
            raise InputError(f"AUX_LATENT holds {held} latents for {num_samples} samples; give one, or one for each")
        return tuple((i if held > 1 else 0,) for i in range(num_samples))


@dataclass(frozen=True, kw_only=True)
class SkipLayers:
    """Skip-layer guidance: away from what the network gives without some of its blocks, in part of the steps."""

    layers: tuple[int, ...]  # indices of blocks
    scale: float
    start: float  # active at step i of n while start * n < i < stop * n
    stop: float

    def is_active(self, step_index: int, num_steps: int) -> bool:
        """Whether the step (counted from 0) is guided."""
        return num_steps * self.start < step_index < num_steps * self.stop


@dataclass(frozen=True, kw_only=True)
class GeneratorInferContext:
    """Everything ``GeneratorRunner.prepare`` reads. Configs are effective: no field is None that matters."""

    run: RunId
    networks: Mapping[ModelKey, Network]
    positive: list[Tensor]  # text encoder outputs, dim 0 = B
    negative: list[Tensor] | None  # None: no guidance branch
    base_latent: BaseLatent
    aux_latent: AuxLatent | None
    vace_context: Tensor | None
    noise: Tensor | None  # instead of drawing it: [B, C, (F,) H, W]
    seeds: tuple[int, ...]  # one per sample
    sample_config: SampleConfig
    execute_config: ExecuteConfig
    scheduler_config: Mapping[str, object]
    device: torch.device
    earlier_draws: tuple[torch.dtype, ...] = ()  # draws of the noise's shape that the generators have made before
    expert_boundary: float | None = None  # of two experts, the first runs at timesteps from here up
    skip_layers: SkipLayers | None = None
    rows_per_forward: int | None = None  # None: all rows in one

    @property
    def num_samples(self) -> int:
        """B."""
        return self.base_latent.latent.shape[0]
