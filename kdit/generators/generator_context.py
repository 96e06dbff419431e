"""What a GENERATE node hands to the runner: models, tensors and settings of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kdit.config import ExecuteConfig, SampleConfig
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
    mask: Tensor | None = None  # image-to-video families only


@dataclass
class AuxLatent:
    """Reference, control or mask latents; the family's handler decides how they act."""

    latent: ImageEmbeds | MultiPromptImageEmbeds


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

    @property
    def num_samples(self) -> int:
        """B."""
        return self.base_latent.latent.shape[0]
