"""LongCat: image, image edit, audio."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.reference.autoencoders import autoencoder_kl
from tests.reference.inputs import EDIT, LONG, NEGATIVE, SHORT, Noise, Picture
from tests.reference.registry import Case, family
from tests.reference.schedulers import FLUX_SHIFT, flow_match
from tests.reference.text_encoders import (
    qwen2_vl_processor,
    qwen25_vl,
    t5_pair,
)
from tests.reference.tokenizers import (
    qwen_tokenizer,
)
from tests.reference.weights import SHARP_GAINS, randomise


def _longcat_image_transformer(seed: int) -> Any:
    transformer = diffusers.LongCatImageTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=20,
        num_attention_heads=4,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        axes_dims_rope=[4, 8, 8],
    )
    return randomise(transformer, seed, SHARP_GAINS)


@family(
    "LongCatImagePipeline",
    [
        Case(
            "base",
            dict(
                prompt=[SHORT, 'a sign that says "open" over a door'],
                negative_prompt=[NEGATIVE, ""],
                height=64,
                width=96,
                num_inference_steps=3,
                guidance_scale=4.5,
                enable_prompt_rewrite=False,
            ),
            note="quoted text is tokenised character by character; guidance renormalised, never enlarged",
        ),
        Case(
            "odd",
            dict(
                prompt=LONG,
                height=80,
                width=112,
                num_inference_steps=2,
                guidance_scale=1.0,
                enable_prompt_rewrite=False,
                latents=Noise((1, 35, 64)),
            ),
            seed=1,
            note="35 image tokens, no guidance",
        ),
        Case(
            "no_renorm",
            dict(
                prompt=LONG,
                height=96,
                width=64,
                num_inference_steps=2,
                guidance_scale=3.0,
                enable_cfg_renorm=False,
                enable_prompt_rewrite=False,
            ),
            seed=2,
        ),
    ],
)
def longcat_image(seed: int) -> Any:
    tokenizer = qwen_tokenizer()
    return diffusers.LongCatImagePipeline(
        transformer=_longcat_image_transformer(seed + 1),
        vae=autoencoder_kl(seed + 2, latent=16),
        text_encoder=qwen25_vl(seed + 3, tokenizer),
        tokenizer=tokenizer,
        text_processor=qwen2_vl_processor(tokenizer),
        scheduler=flow_match(**FLUX_SHIFT),
    )


@family(
    "LongCatImageEditPipeline",
    [
        Case(
            "base",
            dict(
                image=Picture(160, 100, 1), prompt=EDIT, negative_prompt="", num_inference_steps=1, guidance_scale=4.5
            ),
            note="no height/width argument: about 1 megapixel with the aspect of the image",
        )
    ],
)
def longcat_image_edit(seed: int) -> Any:
    tokenizer = qwen_tokenizer()
    return diffusers.LongCatImageEditPipeline(
        transformer=_longcat_image_transformer(seed + 1),
        vae=autoencoder_kl(seed + 2, latent=16, channels=(8, 8, 16, 24), norm_num_groups=4),
        text_encoder=qwen25_vl(seed + 3, tokenizer),
        tokenizer=tokenizer,
        text_processor=qwen2_vl_processor(tokenizer),
        scheduler=flow_match(**FLUX_SHIFT),
    )


@family(
    "LongCatAudioDiTPipeline",
    [
        Case(
            "base",
            dict(prompt=[SHORT, LONG], audio_duration_s=2.0, num_inference_steps=4, guidance_scale=2.5),
            note="unconditional branch = zero embeddings with the prompt's own mask",
        ),
        Case(
            "odd",
            dict(
                prompt=LONG,
                negative_prompt=NEGATIVE,
                num_inference_steps=3,
                guidance_scale=3.0,
                latents=Noise((1, 21, 16)),
            ),
            seed=1,
            note="21 latent frames (taken from the given latents), encoded negative prompt",
        ),
        Case("auto_duration", dict(prompt=LONG, num_inference_steps=2, guidance_scale=1.0), seed=2),
    ],
)
def longcat_audio_dit(seed: int) -> Any:
    text = t5_pair(seed + 3)
    transformer = diffusers.LongCatAudioDiTTransformer(
        dit_dim=80, dit_depth=2, dit_heads=4, dit_text_dim=56, latent_dim=16, ff_mult=2.5
    )
    vae = diffusers.LongCatAudioDiTVae(
        channels=4,
        c_mults=[1, 2, 4, 8, 16],
        strides=[2, 4, 4, 8, 8],
        latent_dim=16,
        encoder_latent_dim=32,
        downsampling_ratio=2048,
        sample_rate=24000,
    )
    return diffusers.LongCatAudioDiTPipeline(
        transformer=randomise(transformer, seed + 1),
        vae=randomise(vae, seed + 2, {r"decoder\..*(original0|weight_g)": 0.35}),
        scheduler=flow_match(shift=1.0, invert_sigmas=True),
        **text,
    )
