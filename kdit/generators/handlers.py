"""The three handlers through which a family differs inside the one denoising loop."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kdit.errors import InputError
from kdit.generators.denoise_state import DenoiseState, Guidance, Scheduler
from kdit.generators.generator_context import AuxLatent, BaseLatent, GeneratorInferContext
from kdit.keys import ModelKey
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

    def noise_dtype(self, network_dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the reference draws the noise and keeps the latents; the network reads its own."""
        return network_dtype

    def pinned_frames(self, ctx: GeneratorInferContext) -> Tensor | None:
        """Leading frames [B, C, f, H, W] that are given: they stand in place of the latents' own in every forward
        and in the result.
        """
        return None

    @abstractmethod
    def pack(self, latents: Tensor) -> Tensor:
        """[B, C, (F,) H, W] to the layout the network reads."""

    @abstractmethod
    def unpack(self, latents: Tensor, noise_shape: tuple[int, ...]) -> Tensor:
        """The inverse of ``pack``; ``noise_shape`` is (C, (F,) H, W)."""


class ImageLatentHandler(LatentHandler):
    """For families that make pictures: the main latent is a shape, or the picture that the loop begins at."""

    def preprocess_base_latent(self, base: BaseLatent, ctx: GeneratorInferContext) -> BaseLatent:
        """Without ``strength`` its shape is all that is read; content would be lost without a word."""
        if ctx.sample_config.strength is None and bool(base.latent.any()):
            raise InputError(
                "BASE_LATENT holds an image, but without a strength only its shape is read: set strength, or feed zeros"
            )
        return base


class DenoiseHandler(ABC):
    """Hooks of the loop: schedule, choice of network, guidance."""

    @abstractmethod
    def set_timesteps(self, scheduler: Scheduler, num_steps: int, noise_shape: tuple[int, ...]) -> None:
        """Give the scheduler its timesteps for latents of ``noise_shape``."""

    @abstractmethod
    def model_times(self, timesteps: Tensor, ctx: GeneratorInferContext, dtype: torch.dtype) -> Tensor:
        """Scheduler timesteps [steps] to what the network of ``dtype`` reads, rounded as the reference rounds;
        [steps, k] where leading frames have times of their own.
        """

    def select_network(self, timestep: float, ctx: GeneratorInferContext) -> ModelKey:
        """The network of the step at ``timestep``; families with experts choose among ``ctx.networks``."""
        (key,) = ctx.networks
        return key

    def cfg_scale(self, network: ModelKey, ctx: GeneratorInferContext) -> float:
        """The scale of classifier-free guidance while ``network`` runs."""
        assert ctx.sample_config.cfg_scale is not None
        return ctx.sample_config.cfg_scale

    def guide(self, predictions: Tensor, guidance: Guidance) -> Tensor:
        """Combine the branches [branches, B, ...] -> [B, ...]: u + s (c - u) (Ho & Salimans 2022).

        A third branch p is the positive one with layers left out: + s2 (c - p) (skip-layer guidance).
        """
        if guidance.kind == "none":
            return predictions[0]
        positive, negative = predictions[:2]
        guided: Tensor = negative + guidance.scale * (positive - negative)
        if len(predictions) == 3:
            assert guidance.skip_layers is not None
            guided = guided + (positive - predictions[2]) * guidance.skip_layers.scale
        return guided

    def before_step(self, state: DenoiseState) -> None:
        """Called for each state before the forward."""

    def after_step(self, state: DenoiseState) -> None:
        """Called for each state after its latents moved."""
