"""Stable Diffusion 3 medium and 3.5 medium."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.reference.autoencoders import autoencoder_kl
from tests.reference.inputs import LONG, NEGATIVE, SHORT, Noise
from tests.reference.registry import Case, family
from tests.reference.schedulers import flow_match
from tests.reference.text_encoders import (
    clip_text,
    t5_encoder,
)
from tests.reference.tokenizers import (
    clip_tokenizer,
    t5_tokenizer,
)
from tests.reference.weights import randomise


def _sd3(seed: int, **options: Any) -> Any:
    clip, clip_g, t5 = clip_tokenizer(), clip_tokenizer(pad_token="!"), t5_tokenizer()
    transformer = diffusers.SD3Transformer2DModel(
        **{
            **dict(
                sample_size=32,
                patch_size=2,
                in_channels=4,
                out_channels=4,
                num_layers=3,
                attention_head_dim=20,
                num_attention_heads=4,
                joint_attention_dim=200,
                caption_projection_dim=80,
                pooled_projection_dim=40 + 56,
                pos_embed_max_size=24,
            ),
            **options,
        }
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=randomise(transformer, seed + 1),
        vae=autoencoder_kl(seed + 2, scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=clip_text(seed + 3, clip, hidden=64, projection=40),
        tokenizer=clip,
        text_encoder_2=clip_text(seed + 4, clip_g, hidden=96, projection=56, act="gelu"),
        tokenizer_2=clip_g,
        text_encoder_3=t5_encoder(seed + 5, t5, d_model=200),
        tokenizer_3=t5,
        scheduler=flow_match(shift=3.0),
    )


SD3_CASES = [
    Case(
        "base",
        dict(
            prompt=[SHORT, LONG],
            negative_prompt=[NEGATIVE, NEGATIVE],
            height=64,
            width=96,
            num_inference_steps=3,
            guidance_scale=5.0,
            max_sequence_length=48,
        ),
        note="a list of prompts needs a list of negative prompts (or none)",
    ),
    Case(
        "odd",
        dict(
            prompt=LONG,
            prompt_2=SHORT,
            height=80,
            width=112,
            num_inference_steps=2,
            guidance_scale=1.0,
            max_sequence_length=36,
            latents=Noise((1, 4, 10, 14)),
        ),
        seed=1,
        note="35 image tokens, 77+36=113 text tokens, no guidance, given latents",
    ),
]


@family("StableDiffusion3Pipeline", SD3_CASES)
def sd3_medium(seed: int) -> Any:
    """SD3-medium: no q/k norm, last block drops the text stream."""
    return _sd3(seed)


@family(
    "StableDiffusion3Pipeline",
    [
        *SD3_CASES,
        Case(
            "skip_layer",
            dict(
                prompt=LONG,
                negative_prompt=NEGATIVE,
                height=96,
                width=64,
                num_inference_steps=4,
                guidance_scale=4.0,
                max_sequence_length=24,
                skip_guidance_layers=[1],
                skip_layer_guidance_scale=2.8,
                skip_layer_guidance_start=0.1,
                skip_layer_guidance_stop=0.8,
            ),
            seed=2,
            note="skip-layer guidance",
        ),
    ],
)
def sd35_medium(seed: int) -> Any:
    """SD3.5-medium: q/k RMS norm and a second image self-attention in the first blocks."""
    return _sd3(seed, qk_norm="rms_norm", dual_attention_layers=(0, 1))
