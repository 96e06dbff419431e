"""Z-Image."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.reference.autoencoders import autoencoder_kl
from tests.reference.inputs import LONG, NEGATIVE, SHORT, Noise
from tests.reference.registry import Case, family
from tests.reference.schedulers import flow_match
from tests.reference.text_encoders import (
    qwen3_causal,
)
from tests.reference.tokenizers import (
    qwen_tokenizer,
)
from tests.reference.weights import randomise


@family(
    "ZImagePipeline",
    [
        Case(
            "base",
            dict(
                prompt=[SHORT, LONG],
                negative_prompt=[NEGATIVE, ""],
                height=64,
                width=96,
                num_inference_steps=3,
                guidance_scale=4.0,
            ),
            note="guidance is cond + g*(cond - uncond); sequences padded to multiples of 32 with learnt tokens",
        ),
        Case(
            "odd",
            dict(
                prompt=LONG,
                height=80,
                width=112,
                num_inference_steps=2,
                guidance_scale=0.0,
                latents=Noise((1, 4, 10, 14)),
            ),
            seed=1,
            note="35 image tokens, no guidance",
        ),
    ],
)
def z_image(seed: int) -> Any:
    tokenizer = qwen_tokenizer()
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=96,
        n_layers=2,
        n_refiner_layers=2,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=64,
        axes_dims=[8, 8, 8],
        axes_lens=[512, 64, 64],
    )
    return diffusers.ZImagePipeline(
        transformer=randomise(transformer, seed + 1),
        vae=autoencoder_kl(seed + 2),
        text_encoder=qwen3_causal(seed + 3, tokenizer, layers=3),
        tokenizer=tokenizer,
        scheduler=flow_match(shift=3.0),
    )
