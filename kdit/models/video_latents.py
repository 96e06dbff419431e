"""Video to latents and back for autoencoders whose latents have a mean and a spread per channel (AutoencoderKLWan)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from kdit.models.config_reader import ConfigReader

# Values of absent keys: the defaults of diffusers' AutoencoderKLWan.
DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "z_dim": 16,
        "base_dim": 96,
        "decoder_base_dim": None,
        "scale_factor_spatial": 8,
        "scale_factor_temporal": 4,
        "latents_mean": None,
        "latents_std": None,
    }
)


class _LatentDistribution(Protocol):
    def mode(self) -> Tensor: ...


class _Encoded(Protocol):
    latent_dist: _LatentDistribution


class _Config(Protocol):
    z_dim: int
    scale_factor_spatial: int
    scale_factor_temporal: int
    latents_mean: Sequence[float]
    latents_std: Sequence[float]


class _Autoencoder(Protocol):
    config: _Config
    dtype: torch.dtype
    device: torch.device

    def encode(self, x: Tensor) -> _Encoded: ...
    def decode(self, z: Tensor, *, return_dict: bool) -> tuple[Tensor]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoVaeParams:
    """What its config.json says about the sizes of latents and features."""

    channels: int  # of latents
    factor: int  # pixels per latent along each side
    temporal_factor: int  # frames per latent frame, but for the first
    features: int  # of the decoder's last level

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> VideoVaeParams:
        """Read config.json. Raises CheckpointError naming the key, what it holds and what is expected."""
        read = ConfigReader(config, "AutoencoderKLWan", defaults=DEFAULTS)
        channels = read.size("z_dim")
        for name, kind in (("latents_mean", "numbers"), ("latents_std", "positive numbers")):
            if name in config and not _has_numbers(config[name], channels, positive=name == "latents_std"):
                raise read.refuse(name, f"{channels} {kind}, one for each channel of the latents (z_dim)")
        return cls(
            channels=channels,
            factor=read.size("scale_factor_spatial"),
            temporal_factor=read.size("scale_factor_temporal"),
            features=read.optional_size("decoder_base_dim") or read.size("base_dim"),
        )


def _has_numbers(values: object, count: int, *, positive: bool) -> bool:
    if not isinstance(values, list | tuple) or len(values) != count:
        return False
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return len(numbers) == count and (min(numbers) > 0 or not positive)


def latent_frames(frame_num: int, temporal_factor: int) -> int:
    """Latent frames of a video: the first frame has one of its own, then each holds ``temporal_factor`` frames."""
    return (frame_num - 1) // temporal_factor + 1


def first_frame_mask(latent: Tensor, channels: int) -> Tensor:
    """[B, channels, F, H, W]: 1 in the first latent frame of ``latent`` [B, C, F, H, W], else 0."""
    mask = latent.new_zeros((latent.shape[0], channels, *latent.shape[2:]))
    mask[:, :, 0] = 1
    return mask


@dataclass(frozen=True)
class VideoAutoencoder:
    """A view of a loaded AutoencoderKLWan: one sample at a time, so that neighbours change nothing."""

    model: nn.Module

    @property
    def _vae(self) -> _Autoencoder:
        return cast(_Autoencoder, self.model)

    @property
    def channels(self) -> int:
        """Latent channels C."""
        return self._vae.config.z_dim

    @property
    def factor(self) -> int:
        """Pixels per latent along each side."""
        return self._vae.config.scale_factor_spatial

    @property
    def temporal_factor(self) -> int:
        """Frames per latent frame, but for the first."""
        return self._vae.config.scale_factor_temporal

    def encode(self, video: Tensor) -> Tensor:
        """video [1, 3, F, H, W] in [-1, 1] -> latents [1, C, f, h, w] float32: the mode of the posterior."""
        given = video.to(self._vae.device, self._vae.dtype).contiguous()
        latents = self._vae.encode(given).latent_dist.mode().float()
        mean, scale = self._statistics(latents)
        return (latents - mean) * scale

    def decode(self, latents: Tensor) -> Tensor:
        """latents [1, C, f, h, w] -> video [1, F, H, W, 3] float32 in [0, 1]; NaN stays NaN."""
        given = latents.to(self._vae.device, self._vae.dtype)
        mean, scale = self._statistics(given)
        (video,) = self._vae.decode((given / scale + mean).contiguous(), return_dict=False)
        return (video * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1).float().contiguous()

    def _statistics(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and 1 / spread of each channel, [1, C, 1, 1, 1]."""
        config = self._vae.config
        stated = (config.latents_mean, config.latents_std)
        mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1).to(latents) for values in stated)
        return mean, 1.0 / std
