"""FLUX.1: conditioning from T5 and CLIP, 2x2-packed latents, resolution-dependent flow schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor

from kdit.errors import InputError
from kdit.generators.capabilities import Capabilities
from kdit.generators.denoise_state import Scheduler
from kdit.generators.generator_context import BaseLatent, GeneratorInferContext
from kdit.generators.generator_def import GeneratorDef
from kdit.generators.handlers import DenoiseHandler, LatentHandler, TextHandler
from kdit.generators.registry import register_generator_def
from kdit.keys import ModelKey
from kdit.models.flux.latents import pack, unpack
from kdit.models.flux.network import FluxNetwork
from kdit.models.rows import Cond


class FluxTextHandler(TextHandler):
    """T5 tokens as text, CLIP's pooled state and the guidance value as vectors."""

    def conditioning(self, encoded: list[Tensor], ctx: GeneratorInferContext) -> Cond:
        """``encoded``: T5 hidden states [B, Lt, D], CLIP pooled state [B, D]."""
        network = ctx.networks[ModelKey.FLUX1]
        assert isinstance(network, FluxNetwork)
        widths = (network.params.joint_attention_dim, network.params.pooled_projection_dim)
        shapes = [tuple(t.shape) for t in encoded]
        if [len(shape) for shape in shapes] != [3, 2] or (shapes[0][-1], shapes[1][-1]) != widths:
            raise InputError(
                f"FLUX.1 text is [T5 states [B, L, {widths[0]}], CLIP pooled [B, {widths[1]}]], got shapes "
                f"{', '.join(map(str, shapes))}"
            )
        txt, pooled = (t.to(ctx.device, network.dtype) for t in encoded)
        guidance = torch.full((txt.shape[0],), ctx.sample_config.guidance_scale or 0.0, device=ctx.device)
        return {"txt": txt, "pooled": pooled, "guidance": guidance}


class FluxLatentHandler(LatentHandler):
    """Latents [B, C, H, W] as tokens [B, H/2 * W/2, 4 C]."""

    def preprocess_base_latent(self, base: BaseLatent, ctx: GeneratorInferContext) -> BaseLatent:
        """Its shape is all that text to image reads; content would be lost without a word."""
        if bool(base.latent.any()):
            raise InputError("BASE_LATENT holds an image, but FLUX.1 text to image takes only its shape: feed zeros")
        return base

    def pack(self, latents: Tensor) -> Tensor:
        """2x2 neighbours become one token."""
        return pack(latents)

    def unpack(self, latents: Tensor, noise_shape: tuple[int, ...]) -> Tensor:
        """Tokens back to the grid."""
        _, height, width = noise_shape
        return unpack(latents, height, width)


class FluxDenoiseHandler(DenoiseHandler):
    """Evenly spaced sigmas, shifted by the number of image tokens where the scheduler asks for it."""

    def set_timesteps(self, scheduler: Scheduler, num_steps: int, noise_shape: tuple[int, ...]) -> None:
        """Sigmas 1 .. 1/steps; mu grows linearly with the number of tokens (Esser et al. 2024, section 5.3.2)."""
        config = scheduler.config
        spacing: dict[str, object] = {"sigmas": np.linspace(1.0, 1 / num_steps, num_steps)}
        if config.get("use_flow_sigmas"):  # the scheduler spaces them itself
            spacing = {"num_inference_steps": num_steps}
        if config.get("use_dynamic_shifting"):
            spacing["mu"] = _shift(config, noise_shape)
        scheduler.set_timesteps(**spacing)

    def model_times(self, timesteps: Tensor, dtype: torch.dtype) -> Tensor:
        """Times 0 to 1. The reference rounds the timestep to the latents' dtype before it divides."""
        return timesteps.to(dtype) / 1000


def _shift(config: Mapping[str, object], noise_shape: tuple[int, ...]) -> float:
    """mu for the number of image tokens: a line through the two points that the scheduler's config states."""

    def number(key: str, default: float) -> float:
        return float(cast(float, config.get(key, default)))

    least, most = number("base_image_seq_len", 256), number("max_image_seq_len", 4096)
    slope = (number("max_shift", 1.15) - number("base_shift", 0.5)) / (most - least)
    _, height, width = noise_shape
    return (height // 2) * (width // 2) * slope + number("base_shift", 0.5) - slope * least


FLUX1 = register_generator_def(
    GeneratorDef(
        model_key=ModelKey.FLUX1,
        text=FluxTextHandler(),
        latent=FluxLatentHandler(),
        denoise=FluxDenoiseHandler(),
        capabilities=Capabilities(embedded_guidance=True, dtypes=("float32", "bfloat16", "float16")),
    )
)
