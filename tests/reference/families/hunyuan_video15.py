"""HunyuanVideo 1.5."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tests.reference.inputs import LONG, NEGATIVE, Noise
from tests.reference.registry import Case, family
from tests.reference.schedulers import flow_match
from tests.reference.text_encoders import (
    t5_encoder,
)
from tests.reference.tokenizers import (
    qwen_tokenizer,
)
from tests.reference.weights import VAE_GAINS, randomise


@family(
    "HunyuanVideo15Pipeline",
    [
        Case(
            "base",
            dict(
                prompt='a neon sign that says "open"',
                negative_prompt=NEGATIVE,
                height=64,
                width=96,
                num_frames=9,
                num_inference_steps=3,
            ),
            note="guidance belongs to the guider component; quoted text goes through ByT5; 3x4x6 tokens; one "
            "prompt, because the library's autoencoder fails on a batch of two",
        ),
        Case(
            "odd",
            dict(
                prompt=LONG,
                height=80,
                width=112,
                num_frames=9,
                num_inference_steps=2,
                latents=Noise((1, 8, 3, 5, 7)),
            ),
            seed=1,
            note="105 video tokens, no negative prompt (the empty prompt is encoded)",
        ),
    ],
)
def hunyuan_video15(seed: int) -> Any:
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    tokenizer = qwen_tokenizer()
    config = Qwen2_5_VLTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=88,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 3, 3]},
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    byt5 = transformers.ByT5Tokenizer()
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=17,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=20,
        num_layers=2,
        num_refiner_layers=2,
        mlp_ratio=3.0,
        text_embed_dim=64,
        text_embed_2_dim=56,
        image_embed_dim=48,
        rope_axes_dim=(4, 8, 8),
        target_size=640,
        task_type="t2v",
    )
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=8, block_out_channels=(16, 16, 16, 32, 32), layers_per_block=1
    )
    return diffusers.HunyuanVideo15Pipeline(
        text_encoder=randomise(Qwen2_5_VLTextModel(config), seed + 3),
        tokenizer=tokenizer,
        transformer=randomise(transformer, seed + 1),
        vae=randomise(vae, seed + 2, VAE_GAINS),
        scheduler=flow_match(shift=7.0),
        text_encoder_2=t5_encoder(seed + 4, byt5),
        tokenizer_2=byt5,
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    )
