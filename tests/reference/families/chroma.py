"""Chroma."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.reference.autoencoders import autoencoder_kl
from tests.reference.inputs import LONG, NEGATIVE, SHORT, Noise
from tests.reference.registry import Case, family
from tests.reference.schedulers import flow_match
from tests.reference.text_encoders import (
    t5_encoder,
)
from tests.reference.tokenizers import (
    t5_tokenizer,
)
from tests.reference.weights import randomise


@family(
    "ChromaPipeline",
    [
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
            note="text padding is masked except for one pad token",
        ),
        Case(
            "odd",
            dict(
                prompt=LONG,
                height=80,
                width=112,
                num_inference_steps=2,
                guidance_scale=1.0,
                max_sequence_length=37,
                latents=Noise((1, 35, 16)),
            ),
            seed=1,
        ),
    ],
)
def chroma(seed: int) -> Any:
    t5 = t5_tokenizer()
    transformer = diffusers.ChromaTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=20,
        num_attention_heads=4,
        joint_attention_dim=56,
        axes_dims_rope=(4, 8, 8),
        approximator_num_channels=64,
        approximator_hidden_dim=48,
        approximator_layers=2,
    )
    return diffusers.ChromaPipeline(
        transformer=randomise(transformer, seed + 1),
        vae=autoencoder_kl(seed + 2),
        text_encoder=t5_encoder(seed + 4, t5),
        tokenizer=t5,
        scheduler=flow_match(shift=1.0),
    )
