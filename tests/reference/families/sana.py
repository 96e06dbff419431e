"""Sana."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tests.reference.inputs import LONG, NEGATIVE, SHORT, Noise
from tests.reference.registry import Case, family
from tests.reference.tokenizers import (
    gemma_tokenizer,
)
from tests.reference.weights import VAE_GAINS, randomise


@family(
    "SanaPipeline",
    [
        Case(
            "base",
            dict(
                prompt=[SHORT, LONG],
                negative_prompt=[NEGATIVE, NEGATIVE],
                height=128,
                width=192,
                num_inference_steps=4,
                guidance_scale=4.5,
                max_sequence_length=40,
                complex_human_instruction=["Enhance the prompt:", "User Prompt: "],
                use_resolution_binning=False,
            ),
            note="4x6 tokens (32x autoencoder); the instruction is put before the prompt",
        ),
        Case(
            "odd",
            dict(
                prompt=LONG,
                height=96,
                width=160,
                num_inference_steps=3,
                guidance_scale=1.0,
                max_sequence_length=37,
                complex_human_instruction=None,
                use_resolution_binning=False,
                latents=Noise((1, 8, 3, 5)),
            ),
            seed=1,
            note="15 tokens, no guidance",
        ),
    ],
)
def sana(seed: int) -> Any:
    """Sana: linear self-attention, gated depth-wise MLP, Gemma-2 text, DC autoencoder, DPM-Solver++."""
    tokenizer = gemma_tokenizer()
    config = transformers.Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=64,
        max_position_embeddings=2048,
    )
    levels = 6
    vae = diffusers.AutoencoderDC(
        latent_channels=8,
        attention_head_dim=8,
        encoder_block_types=("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
        decoder_block_types=("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
        encoder_block_out_channels=(8, 8, 16, 16, 32, 32),
        decoder_block_out_channels=(8, 8, 16, 16, 32, 32),
        encoder_layers_per_block=(1,) * levels,
        decoder_layers_per_block=(1,) * levels,
        encoder_qkv_multiscales=((),) * 3 + ((), (3,), (3,)),
        decoder_qkv_multiscales=((),) * 3 + ((), (3,), (3,)),
        scaling_factor=0.41407,
    )
    transformer = diffusers.SanaTransformer2DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=20,
        num_layers=2,
        num_cross_attention_heads=4,
        cross_attention_head_dim=20,
        cross_attention_dim=80,
        caption_channels=48,
        mlp_ratio=2.5,
        sample_size=32,
    )
    return diffusers.SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=randomise(transformers.Gemma2Model(config), seed + 3),
        vae=randomise(vae, seed + 2, VAE_GAINS),
        transformer=randomise(transformer, seed + 1),
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )
