"""JoyImage Edit Plus."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.reference.autoencoders import autoencoder_wan
from tests.reference.inputs import EDIT, LONG, NEGATIVE, SHORT, Noise, Picture
from tests.reference.registry import Case, family
from tests.reference.schedulers import flow_match
from tests.reference.text_encoders import (
    qwen3_vl,
    qwen3_vl_processor,
)
from tests.reference.tokenizers import (
    qwen_tokenizer,
)
from tests.reference.weights import SHARP_GAINS, randomise


@family(
    "JoyImageEditPlusPipeline",
    [
        Case(
            "base",
            dict(
                prompt=EDIT,
                negative_prompt=NEGATIVE,
                images=[[Picture(400, 100, 1)]],
                height=64,
                width=96,
                num_inference_steps=2,
                guidance_scale=4.0,
            ),
            note="24 target tokens; the reference is cropped to a 1024-base bucket",
        ),
        Case(
            "odd_two_images",
            dict(
                prompt=EDIT,
                images=[[Picture(400, 100, 1), Picture(90, 300, 2)]],
                height=80,
                width=112,
                num_inference_steps=1,
                guidance_scale=1.0,
                latents=[Noise((16, 1, 10, 14))],
            ),
            seed=1,
            note="35 target tokens, two references, no guidance; latents given per sample as (C, 1, H/8, W/8)",
        ),
        Case(
            "text_only",
            dict(prompt=[SHORT, LONG], height=64, width=96, num_inference_steps=2, guidance_scale=3.0),
            seed=2,
            note="no reference image, two prompts",
        ),
    ],
)
def joyimage_edit_plus(seed: int) -> Any:
    tokenizer = qwen_tokenizer()
    transformer = diffusers.JoyImageEditPlusTransformer3DModel(
        patch_size=[1, 2, 2],
        in_channels=16,
        hidden_size=80,
        num_attention_heads=4,
        text_dim=64,
        mlp_width_ratio=3.0,
        num_layers=2,
        rope_dim_list=[4, 8, 8],
        theta=10000,
    )
    return diffusers.JoyImageEditPlusPipeline(
        transformer=randomise(transformer, seed + 1, SHARP_GAINS),
        vae=autoencoder_wan(seed + 2),
        text_encoder=qwen3_vl(seed + 3, tokenizer, layers=3),
        tokenizer=tokenizer,
        processor=qwen3_vl_processor(tokenizer),
        scheduler=flow_match(shift=4.0),
    )
