"""FLUX.1: conditioning from T5 and CLIP, 2x2-packed latents, resolution-dependent flow schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from kdit.errors import InputError
from kdit.generators.capabilities import Capabilities
from kdit.generators.denoise_state import Scheduler
from kdit.generators.generator_context import GeneratorInferContext
from kdit.generators.generator_def import GeneratorDef
from kdit.generators.handlers import DenoiseHandler, LatentHandler, TextHandler
from kdit.generators.registry import register_generator_def
from kdit.keys import ModelKey
from kdit.models.flux.latents import pack, unpack
from kdit.models.rows import Cond

if TYPE_CHECKING:
    from diffusers import FlowMatchEulerDiscreteScheduler


class FluxTextHandler(TextHandler):
    """T5 tokens as text, CLIP's pooled state and the guidance value as vectors."""

    def conditioning(self, encoded: list[Tensor], ctx: GeneratorInferContext) -> Cond:
        """``encoded``: T5 hidden states [B, Lt, D], CLIP pooled state [B, D]."""
        if len(encoded) != 2 or encoded[0].ndim != 3 or encoded[1].ndim != 2:
            shapes = ", ".join(str(tuple(t.shape)) for t in encoded)
            raise InputError(f"FLUX.1 text is [T5 states [B, L, D], CLIP pooled [B, D]], got shapes {shapes}")
        network = ctx.networks[ModelKey.FLUX1]
        txt, pooled = (t.to(ctx.device, network.dtype) for t in encoded)
        guidance = torch.full((txt.shape[0],), ctx.sample_config.guidance_scale or 0.0, device=ctx.device)
        return {"txt": txt, "pooled": pooled, "guidance": guidance}


class FluxLatentHandler(LatentHandler):
    """Latents [B, C, H, W] as tokens [B, H/2 * W/2, 4 C]."""

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
        _, height, width = noise_shape
        flow = cast("FlowMatchEulerDiscreteScheduler", scheduler)
        config = flow.config
        mu = None
        if config.use_dynamic_shifting:
            slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
            intercept = config.base_shift - slope * config.base_image_seq_len
            mu = (height // 2) * (width // 2) * slope + intercept
        flow.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps).tolist(), mu=mu)

    def model_times(self, timesteps: Tensor, dtype: torch.dtype) -> Tensor:
        """Times 0 to 1. The reference rounds the timestep to the latents' dtype before it divides."""
        return timesteps.to(dtype) / 1000


FLUX1 = register_generator_def(
    GeneratorDef(
        model_key=ModelKey.FLUX1,
        text=FluxTextHandler(),
        latent=FluxLatentHandler(),
        denoise=FluxDenoiseHandler(),
        capabilities=Capabilities(embedded_guidance=True, dtypes=("float32", "bfloat16", "float16")),
    )
)
