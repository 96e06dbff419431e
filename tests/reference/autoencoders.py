"""Tiny autoencoders shared by several families."""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np

from tests.reference.weights import IMAGE_3D_VAE_GAINS, VAE_GAINS, VIDEO_VAE_GAINS, randomise


def autoencoder_kl(
    seed: int, latent: int = 4, channels: tuple[int, ...] = (16, 24, 32, 40), quant: bool = False, **options: Any
) -> diffusers.AutoencoderKL:
    """Four levels, hence the usual factor 8."""
    levels = len(channels)
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=channels,
        layers_per_block=1,
        latent_channels=latent,
        use_quant_conv=quant,
        use_post_quant_conv=quant,
        **{"norm_num_groups": 8, "scaling_factor": 0.3611, "shift_factor": 0.1159, **options},
    )
    return randomise(vae, seed, VAE_GAINS)


def latent_statistics(count: int) -> dict[str, list[float]]:
    rng = np.random.default_rng(3)
    return dict(
        latents_mean=[round(float(v), 4) for v in rng.normal(0, 0.5, count)],
        latents_std=[round(float(v), 4) for v in rng.uniform(0.7, 1.6, count)],
    )


def autoencoder_wan(seed: int, latent: int = 16, **options: Any) -> diffusers.AutoencoderKLWan:
    config = dict(base_dim=8, z_dim=latent, dim_mult=[1, 2, 3, 4], num_res_blocks=1, **latent_statistics(latent))
    return randomise(diffusers.AutoencoderKLWan(**{**config, **options}), seed, VIDEO_VAE_GAINS)


def autoencoder_qwen(seed: int, latent: int = 16) -> diffusers.AutoencoderKLQwenImage:
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=latent, dim_mult=[1, 2, 3, 4], num_res_blocks=1, **latent_statistics(latent)
    )
    return randomise(vae, seed, IMAGE_3D_VAE_GAINS)
