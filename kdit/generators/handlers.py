"""The three handlers through which a family differs inside the one denoising loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from kdit.generators.denoise_state import DenoiseState, Guidance, Scheduler
from kdit.generators.generator_context import AuxLatent, BaseLatent, GeneratorInferContext
from kdit.keys import ModelKey
from kdit.models.network import Network
from kdit.models.rows import Cond


class TextHandler(ABC):
    """Turns what the text encoders gave into the network's conditioning."""

    @abstractmethod
    def conditioning(self, encoded: list[Tensor], ctx: GeneratorInferContext) -> Cond:
        """Conditioning of B rows, from the tensors of the POSITIVE or NEGATIVE pin (dim 0 = B)."""


class LatentHandler(ABC):
    """Knows the layout of the family's latents."""

    def preprocess_base_latent(self, base: BaseLatent, ctx: GeneratorInferContext) -> BaseLatent:
        """Check or change the main latent before its shape becomes the noise shape."""
        return base

    def preprocess_aux_latent(self, aux: AuxLatent | None, ctx: GeneratorInferContext) -> AuxLatent | None:
        """Check or change the auxiliary latent."""
        return aux

    @abstractmethod
    def pack(self, latents: Tensor) -> Tensor:
        """[B, C, (F,) H, W] to the layout the network reads."""

    @abstractmethod
    def unpack(self, latents: Tensor, noise_shape: tuple[int, ...]) -> Tensor:
        """The inverse of ``pack``; ``noise_shape`` is (C, (F,) H, W)."""


class DenoiseHandler(ABC):
    """Hooks of the loop: schedule, choice of network, guidance."""

    @abstractmethod
    def set_timesteps(self, scheduler: Scheduler, num_steps: int, noise_shape: tuple[int, ...]) -> None:
        """Give the scheduler its timesteps for latents of ``noise_shape``."""

    @abstractmethod
    def model_times(self, timesteps: Tensor, dtype: torch.dtype) -> Tensor:
        """Scheduler timesteps [steps] to what the network reads, rounded as the reference rounds."""

    def select_network(self, networks: Mapping[ModelKey, Network], ctx: GeneratorInferContext) -> Network:
        """The network of the first step; families with experts choose here."""
        (network,) = networks.values()
        return network

    def guide(self, predictions: Tensor, guidance: Guidance) -> Tensor:
        """Combine the branches [branches, B, ...] -> [B, ...]: u + s (c - u) (Ho & Salimans 2022)."""
        if guidance.kind == "none":
            return predictions[0]
        positive, negative = predictions.unbind(0)
        return negative + guidance.scale * (positive - negative)

    def before_step(self, state: DenoiseState) -> None:
        """Called for each state before the forward."""

    def after_step(self, state: DenoiseState) -> None:
        """Called for each state after its latents moved."""
