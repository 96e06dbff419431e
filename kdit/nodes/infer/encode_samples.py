"""Encodes one picture per sample, or one for all of them, with an image autoencoder. Called by the VAE_ENCODE nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kdit.models.vae_latents import KLAutoencoder
from kdit.nodes.core.pin_hub import PinHub
from kdit.nodes.infer.posterior import posterior_noise


def encode_samples(
    vae: KLAutoencoder, pixels: Sequence[Tensor], noise: Sequence[Tensor] | None, num_samples: int
) -> Tensor:
    """pixels [1, 3, H, W] each, one for all samples or one per sample -> latents [B, C, h, w].

    ``noise`` samples the posteriors, one tensor per sample; None takes their modes. A picture that serves all samples
    is encoded once.
    """
    if len(pixels) == 1:
        latents = vae.encode(pixels[0], None if noise is None else torch.cat(list(noise)))
        return latents.expand(num_samples, *latents.shape[1:])
    drawn = [None] * num_samples if noise is None else noise
    return torch.cat([vae.encode(own, own_noise) for own, own_noise in zip(pixels, drawn, strict=True)])


def sample_noise(
    pins: PinHub, vae: KLAutoencoder, size: tuple[int, int], seeds: Sequence[int], earlier: Sequence[str]
) -> list[Tensor]:
    """Noise of each sample's posterior, drawn after its ``earlier`` draws (names of dtypes), or fed."""
    width, height = size
    shape = (1, vae.channels, height // vae.factor, width // vae.factor)
    return posterior_noise(pins, seeds, shape, vae.dtype, earlier)
