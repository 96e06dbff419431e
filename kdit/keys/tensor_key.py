"""TensorKey: what a tensor on a pin means."""

from enum import Enum


class TensorKey(Enum):
    """Semantic name of a tensor that travels along an edge (B samples, C channels, H/W/F sizes)."""

    POSITIVE = "positive"  # text encoder outputs of the prompt: list of tensors, dim 0 = B
    NEGATIVE = "negative"  # the same for the negative prompt
    BASE_LATENT = "base_latent"  # [B, C, (F,) H, W], or that and a mask; its shape decides the noise shape
    AUX_LATENT = "aux_latent"  # reference or control latents: tensor, or one tensor per prompt
    VACE_CONTEXT = "vace_context"
    NOISE = "noise"  # initial noise as it would have been drawn: [B, C, (F,) H, W]
    POSTERIOR_NOISE = "posterior_noise"  # with which an autoencoder's posterior is sampled, instead of drawing it
    LATENTS = "latents"  # denoised latents, spatial: [B, C, (F,) H, W]
    IMAGE = "image"  # pixels in [0, 1], channels last: [B, H, W, 3], or a list when sizes differ
    MASK = "mask"  # [B, H, W, 1] in [0, 1]: 1 (white) is repainted, 0 kept; a list when sizes differ
    START_IMG = "start_img"
    END_IMG = "end_img"
    VIDEO = "video"  # pixels in [0, 1]: [B, F, H, W, 3]
