"""LTX-2: joint video and audio."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from tests.reference.autoencoders import latent_statistics
from tests.reference.inputs import LONG, NEGATIVE, SHORT
from tests.reference.registry import Case, family
from tests.reference.schedulers import flow_match
from tests.reference.tokenizers import (
    gemma_tokenizer,
)
from tests.reference.weights import VAE_GAINS, randomise


@family(
    "LTX2Pipeline",
    [
        Case(
            "base",
            dict(
                prompt=[SHORT, LONG],
                negative_prompt=[NEGATIVE, NEGATIVE],
                height=96,
                width=128,
                num_frames=17,
                frame_rate=24.0,
                num_inference_steps=3,
                guidance_scale=4.0,
                audio_guidance_scale=5.0,
                stg_scale=1.0,
                spatio_temporal_guidance_blocks=[1],
                modality_scale=3.0,
                guidance_rescale=0.7,
                max_sequence_length=64,
            ),
            note="3x3x4 video tokens, 18 audio tokens; text, spatio-temporal and modality guidance, all on x0",
        ),
        Case(
            "odd",
            dict(
                prompt=LONG,
                height=96,
                width=160,
                num_frames=17,
                frame_rate=25.0,
                num_inference_steps=2,
                guidance_scale=1.0,
                audio_guidance_scale=1.0,
                stg_scale=0.0,
                audio_stg_scale=0.0,
                modality_scale=1.0,
                audio_modality_scale=1.0,
                guidance_rescale=0.0,
                audio_guidance_rescale=0.0,
                max_sequence_length=48,
            ),
            seed=1,
            note="45 video tokens, 17 audio tokens, every guidance switched off",
        ),
    ],
)
def ltx2(seed: int) -> Any:
    """LTX-2 (2.0): joint video and audio, Gemma-3 states of every layer, text connectors, vocoder."""
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    tokenizer = gemma_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    config = Gemma3Config(
        text_config=dict(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=88,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=32,
            max_position_embeddings=2048,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
        vision_config=dict(
            model_type="siglip_vision_model",
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
        mm_tokens_per_image=4,
        boi_token_index=ids("<boi>"),
        eoi_token_index=ids("<eoi>"),
        image_token_index=ids("<img>"),
    )
    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=4,
        attention_head_dim=24,
        cross_attention_dim=96,
        audio_in_channels=32,
        audio_out_channels=32,
        audio_num_attention_heads=4,
        audio_attention_head_dim=16,
        audio_cross_attention_dim=64,
        num_layers=2,
        caption_channels=64,
        rope_type="split",
        perturbed_attn=True,
    )
    connectors = LTX2TextConnectors(
        caption_channels=64,
        text_proj_in_factor=4,
        video_connector_num_attention_heads=4,
        video_connector_attention_head_dim=16,
        video_connector_num_layers=2,
        video_connector_num_learnable_registers=16,
        audio_connector_num_attention_heads=4,
        audio_connector_attention_head_dim=16,
        audio_connector_num_layers=2,
        audio_connector_num_learnable_registers=16,
        rope_type="split",
    )
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=16,
        block_out_channels=(8, 16, 32, 64),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=32, ch_mult=(1, 2, 3), num_res_blocks=1, latent_channels=8, mel_bins=16, resolution=64
    )
    vocoder = LTX2Vocoder(in_channels=32, hidden_channels=64)
    for model, count in ((vae, 16), (audio_vae, 32)):
        statistics = latent_statistics(count)
        model.latents_mean.copy_(torch.tensor(statistics["latents_mean"]))
        model.latents_std.copy_(torch.tensor(statistics["latents_std"]))
    return diffusers.LTX2Pipeline(
        scheduler=flow_match(
            use_dynamic_shifting=True,
            base_shift=0.95,
            max_shift=2.05,
            base_image_seq_len=1024,
            max_image_seq_len=4096,
            shift_terminal=0.1,
        ),
        vae=randomise(vae, seed + 2, VAE_GAINS),
        audio_vae=randomise(audio_vae, seed + 6),
        text_encoder=randomise(Gemma3ForConditionalGeneration(config), seed + 3),
        tokenizer=tokenizer,
        connectors=randomise(connectors, seed + 4),
        transformer=randomise(transformer, seed + 1),
        vocoder=randomise(vocoder, seed + 5, {r"conv_out": 0.3}),
    )
