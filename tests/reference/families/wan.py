"""Wan 2.1 and 2.2: text to video, image to video, first and last frame, VACE."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tests.reference.autoencoders import autoencoder_wan
from tests.reference.inputs import LONG, NEGATIVE, SHORT, Clip, Noise, Picture
from tests.reference.registry import Case, family
from tests.reference.schedulers import flow_match, unipc
from tests.reference.text_encoders import (
    t5_pair,
)
from tests.reference.weights import randomise


def _wan_transformer(seed: int, **options: Any) -> Any:
    config = dict(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=16,
        out_channels=16,
        text_dim=56,
        freq_dim=32,
        ffn_dim=136,
        num_layers=2,
        rope_max_seq_len=64,
    )
    return randomise(diffusers.WanTransformer3DModel(**{**config, **options}), seed)


def _wan_vae_22(seed: int) -> Any:
    """The Wan 2.2 5B autoencoder: 2x2 pixel patches, residual (shortcut) resampling, 16x spatial."""
    return autoencoder_wan(
        seed,
        latent=12,
        dim_mult=[1, 2, 4, 4],
        decoder_base_dim=12,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
    )


WAN_BASE = dict(
    prompt=[SHORT, LONG], negative_prompt=NEGATIVE, height=48, width=64, num_frames=9, num_inference_steps=4
)
WAN_ODD = dict(prompt=LONG, height=48, width=80, num_frames=9, num_inference_steps=3, max_sequence_length=37)


@family(
    "WanPipeline",
    [
        Case("base", {**WAN_BASE, "guidance_scale": 5.0, "max_sequence_length": 48}, note="3x3x4=36 tokens"),
        Case(
            "odd",
            {**WAN_ODD, "guidance_scale": 1.0, "latents": Noise((1, 16, 3, 6, 10))},
            seed=1,
            note="3x3x5=45 tokens, no guidance, default-length text is 512, here 37",
        ),
        Case("image", {**WAN_BASE, "num_frames": 1, "guidance_scale": 3.0}, seed=2, note="one frame, 512 text tokens"),
    ],
)
def wan21_t2v(seed: int) -> Any:
    return diffusers.WanPipeline(
        transformer=_wan_transformer(seed + 1),
        vae=autoencoder_wan(seed + 2),
        scheduler=unipc(3.0),
        **t5_pair(seed + 3),
    )


@family(
    "WanPipeline",
    [Case("base", {**WAN_BASE, "guidance_scale": 5.0, "max_sequence_length": 48})],
)
def wan21_t2v_euler(seed: int) -> Any:
    """The same with the Euler flow-matching scheduler that some repackaged checkpoints carry."""
    return diffusers.WanPipeline(
        transformer=_wan_transformer(seed + 1),
        vae=autoencoder_wan(seed + 2),
        scheduler=flow_match(shift=5.0),
        **t5_pair(seed + 3),
    )


@family(
    "WanPipeline",
    [
        Case(
            "base",
            {**WAN_BASE, "guidance_scale": 4.0, "guidance_scale_2": 3.0, "max_sequence_length": 48},
            note="both experts run; a guidance scale for each",
        ),
        Case("odd", {**WAN_ODD, "guidance_scale": 3.0, "num_inference_steps": 4}, seed=1),
    ],
    denoisers=("transformer", "transformer_2"),
)
def wan22_t2v_a14b(seed: int) -> Any:
    """Wan 2.2 A14B: transformer for t >= boundary_ratio * 1000, transformer_2 below."""
    return diffusers.WanPipeline(
        transformer=_wan_transformer(seed + 1),
        transformer_2=_wan_transformer(seed + 5),
        vae=autoencoder_wan(seed + 2),
        scheduler=unipc(3.0),
        boundary_ratio=0.875,
        **t5_pair(seed + 3),
    )


WAN_5B = dict(in_channels=12, out_channels=12)


@family(
    "WanPipeline",
    [
        Case(
            "base",
            {**WAN_BASE, "height": 96, "width": 128, "guidance_scale": 5.0, "max_sequence_length": 48},
            note="16x autoencoder: 3x3x4 tokens, one timestep per token",
        ),
        Case("odd", {**WAN_ODD, "height": 96, "width": 160, "guidance_scale": 2.0}, seed=1, note="45 tokens"),
    ],
)
def wan22_ti2v_5b(seed: int) -> Any:
    """Wan 2.2 TI2V-5B, text to video (expand_timesteps)."""
    return diffusers.WanPipeline(
        transformer=_wan_transformer(seed + 1, **WAN_5B),
        vae=_wan_vae_22(seed + 2),
        scheduler=unipc(5.0),
        expand_timesteps=True,
        **t5_pair(seed + 3),
    )


@family(
    "WanImageToVideoPipeline",
    [
        Case(
            "base",
            {**WAN_BASE, "height": 96, "width": 128, "prompt": LONG, "image": Picture(128, 96), "guidance_scale": 5.0},
        ),
        Case(
            "odd",
            {**WAN_ODD, "height": 96, "width": 160, "image": Picture(200, 100, 2), "guidance_scale": 1.0},
            seed=1,
            note="45 tokens; image resized",
        ),
    ],
)
def wan22_ti2v_5b_i2v(seed: int) -> Any:
    """Wan 2.2 TI2V-5B, image to video: first latent frame fixed, its tokens at timestep 0."""
    return diffusers.WanImageToVideoPipeline(
        transformer=_wan_transformer(seed + 1, **WAN_5B),
        vae=_wan_vae_22(seed + 2),
        scheduler=unipc(5.0),
        expand_timesteps=True,
        **t5_pair(seed + 3),
    )


def _clip_vision(seed: int) -> dict[str, Any]:
    config = transformers.CLIPVisionConfig(
        hidden_size=72,
        intermediate_size=104,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        hidden_act="gelu",
        projection_dim=48,
    )
    return dict(
        image_encoder=randomise(transformers.CLIPVisionModel(config), seed),
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        ),
    )


@family(
    "WanImageToVideoPipeline",
    [
        Case(
            "base",
            {**WAN_BASE, "image": Picture(64, 48), "guidance_scale": 5.0},
            note="two prompts share one image; max_sequence_length must stay 512",
        ),
        Case(
            "odd",
            {
                **WAN_ODD,
                "image": Picture(100, 50, 2),
                "guidance_scale": 1.0,
                "max_sequence_length": 512,
                "latents": Noise((1, 16, 3, 6, 10)),
            },
            seed=1,
            note="45 tokens; image resized",
        ),
    ],
)
def wan21_i2v(seed: int) -> Any:
    """Wan 2.1 I2V: CLIP image tokens with their own key/value projections, 16+4+16 input channels."""
    return diffusers.WanImageToVideoPipeline(
        transformer=_wan_transformer(seed + 1, in_channels=36, image_dim=72, added_kv_proj_dim=96),
        vae=autoencoder_wan(seed + 2),
        scheduler=unipc(3.0),
        **_clip_vision(seed + 4),
        **t5_pair(seed + 3),
    )


@family(
    "WanImageToVideoPipeline",
    [
        Case(
            "base",
            {
                **WAN_BASE,
                "prompt": LONG,
                "image": Picture(64, 48),
                "last_image": Picture(64, 48, 5),
                "guidance_scale": 5.0,
            },
            note="first and last frame",
        )
    ],
)
def wan21_flf2v(seed: int) -> Any:
    """Wan 2.1 FLF2V: a position table over the tokens of both images."""
    return diffusers.WanImageToVideoPipeline(
        transformer=_wan_transformer(
            seed + 1, in_channels=36, image_dim=72, added_kv_proj_dim=96, pos_embed_seq_len=2 * 17
        ),
        vae=autoencoder_wan(seed + 2),
        scheduler=unipc(3.0),
        **_clip_vision(seed + 4),
        **t5_pair(seed + 3),
    )


@family(
    "WanImageToVideoPipeline",
    [
        Case(
            "base",
            {
                **WAN_BASE,
                "image": Picture(64, 48),
                "guidance_scale": 3.5,
                "guidance_scale_2": 2.5,
                "max_sequence_length": 48,
            },
        ),
        Case(
            "odd_last_image",
            {
                **WAN_ODD,
                "image": Picture(80, 48, 2),
                "last_image": Picture(80, 48, 3),
                "guidance_scale": 2.0,
                "num_inference_steps": 4,
            },
            seed=1,
            note="45 tokens; first and last frame",
        ),
    ],
    denoisers=("transformer", "transformer_2"),
)
def wan22_i2v_a14b(seed: int) -> Any:
    """Wan 2.2 I2V-A14B: two experts, no image encoder."""
    return diffusers.WanImageToVideoPipeline(
        transformer=_wan_transformer(seed + 1, in_channels=36),
        transformer_2=_wan_transformer(seed + 5, in_channels=36),
        vae=autoencoder_wan(seed + 2),
        scheduler=unipc(3.0),
        boundary_ratio=0.9,
        **t5_pair(seed + 3),
    )


@family(
    "WanVACEPipeline",
    [
        Case(
            "base",
            {
                **WAN_BASE,
                "prompt": LONG,
                "video": Clip(64, 48, 9, 1),
                "mask": Clip(64, 48, 9, 2, True),
                "reference_images": [Picture(64, 48, 3), Picture(40, 60, 4)],
                "guidance_scale": 5.0,
                "conditioning_scale": 0.8,
                "max_sequence_length": 48,
            },
            note="two reference images add two latent frames in front; one prompt only",
        ),
        Case(
            "odd_no_reference",
            {
                **WAN_ODD,
                "video": Clip(80, 48, 9, 1),
                "mask": Clip(80, 48, 9, 2, True),
                "guidance_scale": 1.0,
                "conditioning_scale": [0.5, 1.0],
            },
            seed=1,
            note="45 tokens, a scale for each VACE layer",
        ),
        Case("text_only", {**WAN_ODD, "guidance_scale": 3.0}, seed=2, note="no video: zeros, mask of ones"),
    ],
)
def wan21_vace(seed: int) -> Any:
    transformer = diffusers.WanVACETransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=16,
        out_channels=16,
        text_dim=56,
        freq_dim=32,
        ffn_dim=136,
        num_layers=4,
        rope_max_seq_len=64,
        vace_layers=[0, 2],
        vace_in_channels=96,
    )
    return diffusers.WanVACEPipeline(
        transformer=randomise(transformer, seed + 1),
        vae=autoencoder_wan(seed + 2),
        scheduler=unipc(3.0),
        **t5_pair(seed + 3),
    )
