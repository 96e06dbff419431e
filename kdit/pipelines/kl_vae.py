"""What pipelines read of the settings of a KL autoencoder before it is loaded. Called by pipelines/defs."""

from __future__ import annotations

from kdit.errors import CheckpointError
from kdit.models.checkpoint import Checkpoint
from kdit.models.rows import LatentShape
from kdit.models.vae_latents import spatial_factor

WHERE = "vae/config.json"


def pixels_per_latent(checkpoint: Checkpoint) -> int:
    """Along each side."""
    return spatial_factor(_features(checkpoint))


def kl_latent_shape(checkpoint: Checkpoint, size: tuple[int, int]) -> LatentShape:
    """(C, H/f, W/f) for a picture of ``size`` (width, height)."""
    channels, factor = checkpoint.component("vae").config.get("latent_channels"), pixels_per_latent(checkpoint)
    if not isinstance(channels, int):
        raise CheckpointError(f"{WHERE}: latent_channels must be a whole number, got {channels!r}")
    width, height = size
    return channels, height // factor, width // factor


def check_kl_scaling(checkpoint: Checkpoint) -> None:
    """What is read only when pictures are encoded or decoded must fail before. Raises CheckpointError."""
    for name in ("scaling_factor", "shift_factor"):
        value = checkpoint.component("vae").config.get(name)
        if value is not None and not isinstance(value, int | float):
            raise CheckpointError(f"{WHERE}: {name} must be a number, got {value!r}")


def decoding_floor(checkpoint: Checkpoint, size: tuple[int, int], itemsize: int) -> int:
    """Bytes that decoding one sample needs at the very least: the last level's features, in and out."""
    width, height = size
    return 2 * width * height * _features(checkpoint)[0] * itemsize


def _features(checkpoint: Checkpoint) -> tuple[int, ...]:
    widths = checkpoint.component("vae").config.get("block_out_channels")
    if not isinstance(widths, list | tuple) or not widths or not all(isinstance(width, int) for width in widths):
        raise CheckpointError(f"{WHERE}: block_out_channels must be a list of whole numbers, got {widths!r}")
    return tuple(widths)
