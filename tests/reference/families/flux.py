"""FLUX.1: dev, schnell, Fill, Control (Depth, Canny) and Kontext."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.reference.autoencoders import autoencoder_kl
from tests.reference.inputs import LONG, NEGATIVE, SHORT, Noise, Picture
from tests.reference.registry import Case, family
from tests.reference.schedulers import FLUX_SHIFT, flow_match
from tests.reference.text_encoders import (
    clip_text,
    t5_encoder,
)
from tests.reference.tokenizers import (
    clip_tokenizer,
    t5_tokenizer,
)
from tests.reference.weights import randomise


def _flux_parts(seed: int, in_channels: int, out_channels: int | None, guidance: bool) -> dict[str, Any]:
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=in_channels,
        out_channels=out_channels,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=20,
        num_attention_heads=4,
        joint_attention_dim=56,
        pooled_projection_dim=96,
        guidance_embeds=guidance,
        axes_dims_rope=(4, 8, 8),
    )
    return dict(
        transformer=randomise(transformer, seed + 1),
        vae=autoencoder_kl(seed + 2),
        text_encoder=clip_text(seed + 3, clip),
        tokenizer=clip,
        text_encoder_2=t5_encoder(seed + 4, t5),
        tokenizer_2=t5,
        scheduler=flow_match(**FLUX_SHIFT) if guidance else flow_match(shift=1.0),
    )


def _flux_cases(**extra: Any) -> list[Case]:
    base = dict(prompt=[SHORT, LONG], height=64, width=96, num_inference_steps=3, max_sequence_length=48)
    odd = dict(prompt=LONG, height=80, width=112, num_inference_steps=2, max_sequence_length=37)
    return [
        Case("base", {**base, "guidance_scale": 3.5, **extra}, note="two prompts of different length, 4x6 tokens"),
        Case(
            "odd",
            {**odd, "guidance_scale": 1.7, "latents": Noise((1, 35, 16)), **extra},
            seed=1,
            note="5x7=35 image tokens, 37 text tokens, packed latents given",
        ),
    ]


FLUX_CFG = Case(
    "true_cfg",
    dict(
        prompt=LONG,
        negative_prompt=NEGATIVE,
        true_cfg_scale=2.5,
        guidance_scale=3.0,
        height=96,
        width=64,
        num_inference_steps=2,
    ),
    seed=2,
    note="real classifier-free guidance beside the embedded guidance; default 512 text tokens",
)


@family("FluxPipeline", [*_flux_cases(), FLUX_CFG])
def flux_dev(seed: int) -> Any:
    """FLUX.1-dev: embedded guidance, dynamic shift."""
    return diffusers.FluxPipeline(**_flux_parts(seed, 16, None, True))


@family("FluxPipeline", [*_flux_cases(), FLUX_CFG])
def flux_schnell(seed: int) -> Any:
    """FLUX.1-schnell: no guidance embedding (guidance_scale is ignored), shift 1."""
    return diffusers.FluxPipeline(**_flux_parts(seed, 16, None, False))


@family(
    "FluxFillPipeline",
    [
        Case("base", {**_flux_cases()[0].call, "image": Picture(96, 64), "mask_image": Picture(96, 64, 1, True)}),
        Case(
            "odd",
            {
                **{k: v for k, v in _flux_cases()[1].call.items() if k != "latents"},
                "image": Picture(150, 90, 2),
                "mask_image": Picture(150, 90, 3, True),
            },
            seed=1,
            note="35 tokens; image and mask are resized",
        ),
    ],
)
def flux_fill(seed: int) -> Any:
    """FLUX.1-Fill: input = latents + masked-image latents + the 8x8 mask folded into channels."""
    vae_side = 8
    channels = 16 + 16 + 4 * vae_side * vae_side
    return diffusers.FluxFillPipeline(**_flux_parts(seed, channels, 16, True))


@family(
    "FluxControlPipeline",
    [
        Case("base", {**_flux_cases()[0].call, "control_image": Picture(96, 64)}),
        Case("odd", {**_flux_cases()[1].call, "control_image": Picture(150, 90, 2)}, seed=1, note="35 tokens"),
    ],
)
def flux_control(seed: int) -> Any:
    """FLUX.1-Depth/Canny: the control latents are concatenated on the channels."""
    return diffusers.FluxControlPipeline(**_flux_parts(seed, 32, 16, True))


@family(
    "FluxKontextPipeline",
    [
        Case(
            "base",
            {
                **_flux_cases()[0].call,
                "image": Picture(96, 80),
                "max_area": 64 * 96,
                "_auto_resize": False,
            },
            note="reference image kept at its own size (5x6 tokens)",
        ),
        Case(
            "odd",
            {**_flux_cases()[1].call, "image": Picture(112, 80, 2), "max_area": 80 * 112, "_auto_resize": False},
            seed=1,
            note="35 + 35 image tokens",
        ),
        Case("no_image", {**_flux_cases()[0].call, "max_area": 64 * 96}, seed=2, note="text to image"),
        Case(
            "auto_resize",
            {
                **_flux_cases()[1].call,
                "image": Picture(160, 100, 3),
                "max_area": 80 * 112,
                "num_inference_steps": 1,
            },
            seed=3,
            note="default: the reference image is resized to the nearest preferred 1-megapixel size",
        ),
    ],
)
def flux_kontext(seed: int) -> Any:
    """FLUX.1-Kontext: reference tokens are appended to the image sequence, first rope axis = 1."""
    return diffusers.FluxKontextPipeline(**_flux_parts(seed, 16, None, True))
