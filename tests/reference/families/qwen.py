"""Qwen-Image and its two edit models."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.reference.autoencoders import autoencoder_qwen
from tests.reference.inputs import EDIT, LONG, SHORT, Noise, Picture
from tests.reference.registry import Case, family
from tests.reference.schedulers import QWEN_SHIFT, flow_match
from tests.reference.text_encoders import (
    qwen2_vl_processor,
    qwen25_vl,
)
from tests.reference.tokenizers import (
    qwen_tokenizer,
)
from tests.reference.weights import SHARP_GAINS, randomise


def _qwen_image_transformer(seed: int, **options: Any) -> Any:
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=20,
        num_attention_heads=4,
        joint_attention_dim=64,
        axes_dims_rope=(4, 8, 8),
        **options,
    )
    return randomise(transformer, seed, SHARP_GAINS)


@family(
    "QwenImagePipeline",
    [
        Case(
            "base",
            dict(
                prompt=[SHORT, LONG],
                negative_prompt=[" ", " "],
                true_cfg_scale=4.0,
                height=64,
                width=96,
                num_inference_steps=3,
            ),
            note="norm-preserving guidance; padding mask inside the batch",
        ),
        Case(
            "odd",
            dict(prompt=LONG, height=80, width=112, num_inference_steps=2, latents=Noise((1, 35, 64))),
            seed=1,
            note="35 image tokens, no negative prompt, hence no guidance",
        ),
    ],
)
def qwen_image(seed: int) -> Any:
    tokenizer = qwen_tokenizer()
    return diffusers.QwenImagePipeline(
        transformer=_qwen_image_transformer(seed + 1),
        vae=autoencoder_qwen(seed + 2),
        text_encoder=qwen25_vl(seed + 3, tokenizer),
        tokenizer=tokenizer,
        scheduler=flow_match(**QWEN_SHIFT),
    )


QWEN_EDIT_CASES = [
    Case(
        "base",
        dict(
            prompt=EDIT,
            negative_prompt=" ",
            true_cfg_scale=4.0,
            image=[Picture(160, 100, 1)],
            height=64,
            width=96,
            num_inference_steps=2,
        ),
        note="24 target tokens; the reference is resized to about 1 megapixel for the VAE (4000+ tokens)",
    ),
    Case(
        "odd_two_images",
        dict(
            prompt=EDIT,
            image=[Picture(160, 100, 1), Picture(90, 120, 2)],
            height=80,
            width=112,
            num_inference_steps=2,
            latents=Noise((1, 35, 64)),
        ),
        seed=1,
        note="two references of different aspect, 35 target tokens, no guidance",
    ),
]


def _qwen_edit_plus(seed: int, **options: Any) -> Any:
    tokenizer = qwen_tokenizer()
    return diffusers.QwenImageEditPlusPipeline(
        transformer=_qwen_image_transformer(seed + 1, **options),
        vae=autoencoder_qwen(seed + 2),
        text_encoder=qwen25_vl(seed + 3, tokenizer),
        tokenizer=tokenizer,
        processor=qwen2_vl_processor(tokenizer),
        scheduler=flow_match(**QWEN_SHIFT),
    )


@family("QwenImageEditPlusPipeline", QWEN_EDIT_CASES)
def qwen_image_edit_plus(seed: int) -> Any:
    """Qwen-Image-Edit-2509."""
    return _qwen_edit_plus(seed)


@family("QwenImageEditPlusPipeline", QWEN_EDIT_CASES[:1])
def qwen_image_edit_2511(seed: int) -> Any:
    """Qwen-Image-Edit-2511: zero_cond_t, i.e. reference tokens are modulated with timestep 0."""
    return _qwen_edit_plus(seed, zero_cond_t=True)
