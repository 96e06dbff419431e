"""Pixels to latents and back for autoencoders whose latents have one scale and one shift (AutoencoderKL)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn


class _LatentDistribution(Protocol):
    mean: Tensor
    std: Tensor

    def mode(self) -> Tensor: ...


class _Encoded(Protocol):
    latent_dist: _LatentDistribution


class _Config(Protocol):
    latent_channels: int
    block_out_channels: tuple[int, ...]
    scaling_factor: float
    shift_factor: float | None


class _Autoencoder(Protocol):
    config: _Config
    dtype: torch.dtype
    device: torch.device

    def encode(self, x: Tensor) -> _Encoded: ...
    def decode(self, z: Tensor, *, return_dict: bool) -> tuple[Tensor]: ...


def spatial_factor(block_out_channels: Sequence[int]) -> int:
    """Pixels per latent along each side: every level but the last halves the picture."""
    return int(2 ** (len(block_out_channels) - 1))


@dataclass(frozen=True)
class KLAutoencoder:
    """A view of a loaded AutoencoderKL: one sample at a time, so that neighbours change nothing."""

    model: nn.Module

    @property
    def _vae(self) -> _Autoencoder:
        return cast(_Autoencoder, self.model)

    @property
    def channels(self) -> int:
        """Latent channels C."""
        return self._vae.config.latent_channels

    @property
    def factor(self) -> int:
        """Pixels per latent along each side."""
        return spatial_factor(self._vae.config.block_out_channels)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it computes in, and in which the reference draws the noise of a posterior."""
        return self._vae.dtype

    def encode(self, pixels: Tensor, noise: Tensor | None) -> Tensor:
        """pixels [1, 3, H, W] in [-1, 1] -> latents [n, C, H/f, W/f]: the posterior sampled n times with
        ``noise`` of that shape, or its mode without (n = 1).
        """
        config = self._vae.config
        # Channels-last views would make torch's CPU group norm sum a large image coarsely (1e-3 off).
        given = pixels.to(self._vae.device, self._vae.dtype).contiguous()
        posterior = self._vae.encode(given).latent_dist
        latents = posterior.mode() if noise is None else posterior.mean + posterior.std * noise.to(posterior.mean)
        return (latents - (config.shift_factor or 0.0)) * config.scaling_factor

    def decode(self, latents: Tensor) -> Tensor:
        """latents [1, C, h, w] -> pixels [1, H, W, 3] float32 in [0, 1]; NaN stays NaN."""
        config = self._vae.config
        scaled = latents.to(self._vae.device, self._vae.dtype) / config.scaling_factor + (config.shift_factor or 0.0)
        (pixels,) = self._vae.decode(scaled, return_dict=False)
        return (pixels * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float().contiguous()
