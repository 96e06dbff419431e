"""FLUX.2: dev, klein and klein distilled."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.reference.inputs import EDIT, LONG, SHORT, Noise, Picture
from tests.reference.registry import Case, family
from tests.reference.schedulers import FLUX_SHIFT, flow_match
from tests.reference.text_encoders import (
    qwen3_causal,
)
from tests.reference.tokenizers import (
    MISTRAL_CHAT_TEMPLATE,
    mistral_tokenizer,
    qwen_tokenizer,
)
from tests.reference.weights import DEEP_GAINS, VAE_GAINS, randomise


def _flux2_transformer(seed: int, text_width: int, guidance: bool) -> Any:
    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=24,
        num_attention_heads=4,
        joint_attention_dim=3 * text_width,
        timestep_guidance_channels=32,
        mlp_ratio=2.5,
        axes_dims_rope=(4, 6, 6, 8),
        guidance_embeds=guidance,
    )
    return randomise(transformer, seed)


def _flux2_vae(seed: int) -> Any:
    vae = diffusers.AutoencoderKLFlux2(
        block_out_channels=(16, 24, 32, 40), layers_per_block=1, latent_channels=4, norm_num_groups=8
    )
    return randomise(vae, seed, VAE_GAINS)


def _flux2_cases(guidance: float) -> list[Case]:
    return [
        Case(
            "base",
            dict(
                prompt=[SHORT, LONG],
                height=64,
                width=96,
                num_inference_steps=3,
                guidance_scale=guidance,
                max_sequence_length=96,
            ),
        ),
        Case(
            "odd",
            dict(
                prompt=LONG,
                height=80,
                width=112,
                num_inference_steps=2,
                guidance_scale=guidance,
                max_sequence_length=75,
                latents=Noise((1, 16, 5, 7)),
            ),
            seed=1,
            note="35 image tokens, 75 text tokens; given latents are (B, 4C, H/16, W/16), not packed",
        ),
        Case(
            "edit",
            dict(
                prompt=EDIT,
                image=[Picture(96, 70, 1), Picture(64, 80, 2)],
                height=64,
                width=96,
                num_inference_steps=2,
                guidance_scale=guidance,
                max_sequence_length=96,
            ),
            seed=2,
            note="two reference images of different size",
        ),
    ]


@family("Flux2Pipeline", _flux2_cases(4.0))
def flux2(seed: int) -> Any:
    """FLUX.2-dev: hidden states 10, 20 and 30 of a Mistral-Small-3 LM, left padding, embedded guidance."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PixtralImageProcessor, PixtralProcessor

    tokenizer = mistral_tokenizer()
    config = Mistral3Config(
        text_config=dict(
            model_type="mistral",
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=88,
            num_hidden_layers=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            max_position_embeddings=4096,
            sliding_window=None,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000000.0},
        ),
        vision_config=dict(
            model_type="pixtral",
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=64,
            patch_size=14,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
    )
    processor = PixtralProcessor(
        image_processor=PixtralImageProcessor(patch_size=14, size={"longest_edge": 64}),
        tokenizer=tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=MISTRAL_CHAT_TEMPLATE,
    )
    return diffusers.Flux2Pipeline(
        transformer=_flux2_transformer(seed + 1, 64, True),
        vae=_flux2_vae(seed + 2),
        text_encoder=randomise(Mistral3ForConditionalGeneration(config), seed + 3, DEEP_GAINS),
        tokenizer=processor,
        scheduler=flow_match(**FLUX_SHIFT),
    )


@family("Flux2KleinPipeline", _flux2_cases(3.0))
def flux2_klein(seed: int) -> Any:
    """FLUX.2-klein (base): hidden states 9, 18, 27 of a Qwen3 LM, true guidance against the empty prompt."""
    tokenizer = qwen_tokenizer()
    return diffusers.Flux2KleinPipeline(
        transformer=_flux2_transformer(seed + 1, 64, False),
        vae=_flux2_vae(seed + 2),
        text_encoder=qwen3_causal(seed + 3, tokenizer, layers=29),
        tokenizer=tokenizer,
        scheduler=flow_match(**FLUX_SHIFT),
        is_distilled=False,
    )


@family("Flux2KleinPipeline", [c for c in _flux2_cases(3.0) if c.name != "odd"])
def flux2_klein_distilled(seed: int) -> Any:
    """FLUX.2-klein (distilled): is_distilled in model_index.json switches the guidance off."""
    tokenizer = qwen_tokenizer()
    return diffusers.Flux2KleinPipeline(
        transformer=_flux2_transformer(seed + 1, 64, False),
        vae=_flux2_vae(seed + 2),
        text_encoder=qwen3_causal(seed + 3, tokenizer, layers=29),
        tokenizer=tokenizer,
        scheduler=flow_match(**FLUX_SHIFT),
        is_distilled=True,
    )
