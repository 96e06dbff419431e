"""MiniMax-H3: video with sound."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.reference.autoencoders import latent_statistics
from tests.reference.inputs import LONG, SHORT, Noise, Picture, Reference
from tests.reference.registry import Case, family
from tests.reference.text_encoders import (
    qwen3_vl,
    qwen3_vl_processor,
)
from tests.reference.tokenizers import (
    qwen_tokenizer,
)
from tests.reference.weights import SHARP_GAINS, VAE_GAINS, randomise

H3_BASE = dict(num_frames=124, height=64, width=96, num_inference_steps=3, output_type="np")


@family(
    "MiniMaxH3ModularPipeline",
    [
        Case(
            "t2va", {**H3_BASE, "prompt": LONG}, note="124 frames (the shortest allowed), 207 audio latents a channel"
        ),
        Case(
            "t2va_given_noise",
            {
                **H3_BASE,
                "prompt": SHORT,
                "height": 96,
                "width": 96,
                "latents": Noise((1, 6, 37, 6, 6)),
                "audio_latents": Noise((2, 10, 207), 8),
            },
            seed=1,
            note="9 tokens a frame, both noises given",
        ),
        Case("fl2va_first", {**H3_BASE, "prompt": LONG, "image": Picture(120, 80, 1)}, seed=2, note="first keyframe"),
        Case(
            "fl2va_both",
            {**H3_BASE, "prompt": LONG, "image": Picture(120, 80, 1), "last_image": Picture(90, 90, 2)},
            seed=3,
            note="first frame stretched, last frame cover-cropped",
        ),
        Case(
            "ref2va",
            {
                **H3_BASE,
                "prompt": LONG,
                "num_inference_steps": 2,
                "references": [
                    Reference("audio", seconds=1.0, seed=4),
                    Reference("video", 96, 64, frames=39, seconds=1.0, seed=5),
                ],
            },
            seed=4,
            note="transformer_ref; an audio reference and a video reference with soundtrack. The video is put "
            "on the 768-short-edge canvas of the config, here 64",
        ),
    ],
    denoisers=("transformer", "transformer_ref"),
    latent_output=False,
    modular=True,
)
def minimax_h3(seed: int) -> Any:
    """MiniMax-H3 video + audio: hidden state 50 of Qwen3-VL (so 51 layers are needed), one packed
    sequence of text, conditions, audio and video rows, two schedules."""
    from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3Blocks

    def transformer(offset: int) -> Any:
        model = diffusers.MiniMaxH3Transformer3DModel(
            num_attention_heads=4,
            attention_head_dim=24,
            hidden_size=80,
            num_layers=2,
            num_refiner_layers=2,
            ffn_dim=104,
            in_channels=6,
            audio_in_channels=10,
            patch_size=(1, 2, 2),
            text_dim=48,
            freq_dim=32,
            time_embed_hidden_dim=72,
            time_embed_dim=40,
            rope_freq_dim=3,
        )
        return randomise(model, seed + offset, SHARP_GAINS)

    tokenizer = qwen_tokenizer()
    vae = diffusers.AutoencoderKLMiniMaxH3(
        latent_channels=6,
        block_out_channels=(8, 12, 16, 20, 24, 28),
        layers_per_block=1,
        norm_num_groups=4,
        decoder_num_layers=2,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=32,
        decoder_ffn_mult=2,
        **latent_statistics(6),
    )
    audio_vae = diffusers.AutoencoderKLMiniMaxH3Audio(
        encoder_dim=4,
        latent_dim=80,
        latent_channels=10,
        num_attention_heads=4,
        decoder_dim=256,
        resblock_kernel_sizes=(3, 7),
        resblock_dilation_sizes=((1, 3, 5), (1, 3, 5)),
        **latent_statistics(10),
    )
    pipe = MiniMaxH3Blocks().init_pipeline()
    pipe.update_components(
        transformer=transformer(1),
        transformer_ref=transformer(7),
        vae=randomise(vae, seed + 2, VAE_GAINS),
        audio_vae=randomise(audio_vae, seed + 6, {r"decoder\.conv_post": 0.3}),
        text_encoder=qwen3_vl(seed + 3, tokenizer, layers=51, hidden=48),
        tokenizer=tokenizer,
        processor=qwen3_vl_processor(tokenizer),
        scheduler=diffusers.MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=diffusers.MiniMaxH3Scheduler(shift=3.0),
        canvas_short_edge=64,
        canvas_max_pixels=64 * 128,
        reference_image_short_edge=64,
    )
    return pipe
