"""Stable Diffusion 3 and 3.5: text of two CLIPs and T5, latents on their grid, a flow schedule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kdit.errors import InputError
from kdit.generators.capabilities import Capabilities
from kdit.generators.denoise_state import Scheduler
from kdit.generators.flow_shift import flow_shift
from kdit.generators.generator_context import GeneratorInferContext
from kdit.generators.generator_def import GeneratorDef
from kdit.generators.handlers import DenoiseHandler, ImageLatentHandler, TextHandler
from kdit.generators.registry import register_generator_def
from kdit.keys import ModelKey
from kdit.models.rows import Cond
from kdit.models.sd3.config import PATCH, SD3Params
from kdit.models.sd3.network import SD3Network
from kdit.models.sd3.text import join_clip, join_text

MAX_SHIFT = 1.16  # the reference's, for a scheduler whose config states none
RANKS = {2: (3, 2), 4: (3, 2, 3, 2), 5: (3, 2, 3, 2, 3)}  # dimensions of the tensors, by their number


class SD3TextHandler(TextHandler):
    """Tokens of both CLIPs beside each other, then T5's; the pooled states of the CLIPs as a vector."""

    def conditioning(self, encoded: list[Tensor], ctx: GeneratorInferContext) -> Cond:
        """``encoded``: states [B, L, D] and pooled state [B, P] of CLIP-L, the same of CLIP-G, T5's states where there
        is a T5; or two tensors, the text and the pooled text as they would come of these.
        """
        network = ctx.networks[ModelKey.SD3]
        assert isinstance(network, SD3Network)
        params = network.params
        moved = [tensor.to(ctx.device, network.dtype) for tensor in encoded]
        if tuple(tensor.ndim for tensor in moved) != RANKS.get(len(moved)):
            raise _wrong_text(encoded, params)
        if len(moved) == 2:
            txt, pooled = moved
        else:
            clip, pooled = join_clip(moved[:4])
            t5 = moved[4] if len(moved) == 5 else _no_t5(len(clip), params, ctx).to(clip)
            if clip.shape[-1] > t5.shape[-1]:
                raise _wrong_text(encoded, params)
            txt = join_text(clip, t5)
        if (txt.shape[-1], pooled.shape[-1]) != (params.txt_dim, params.pooled_dim):
            raise _wrong_text(encoded, params)
        return {"txt": txt, "pooled": pooled}


def _no_t5(num_samples: int, params: SD3Params, ctx: GeneratorInferContext) -> Tensor:
    """What stands in T5's place: the reference lets zeros attend, as many as T5 would have given."""
    length = ctx.sample_config.max_sequence_length
    assert length is not None
    return torch.zeros(num_samples, length, params.txt_dim)


def _wrong_text(encoded: Sequence[Tensor], params: SD3Params) -> InputError:
    return InputError(
        f"SD3 text is [states [B, L, {params.txt_dim}], pooled [B, {params.pooled_dim}]], or states and pooled state "
        f"of CLIP-L, of CLIP-G, and T5's states; got shapes {', '.join(str(tuple(t.shape)) for t in encoded)}"
    )


class SD3LatentHandler(ImageLatentHandler):
    """The network reads latents [B, C, H, W] as they are."""

    def pack(self, latents: Tensor) -> Tensor:
        """Nothing to do."""
        return latents

    def unpack(self, latents: Tensor, noise_shape: tuple[int, ...]) -> Tensor:
        """Nothing to do."""
        return latents


class SD3DenoiseHandler(DenoiseHandler):
    """The scheduler's own spacing, shifted by the number of image tokens where its config asks for that."""

    def set_timesteps(self, scheduler: Scheduler, num_steps: int, noise_shape: tuple[int, ...]) -> None:
        """``num_steps`` timesteps from noise to image."""
        config = scheduler.config
        if not config.get("use_dynamic_shifting"):
            scheduler.set_timesteps(num_inference_steps=num_steps)
            return
        _, height, width = noise_shape
        mu = flow_shift(config, (height // PATCH) * (width // PATCH), max_shift=MAX_SHIFT)
        scheduler.set_timesteps(num_inference_steps=num_steps, mu=mu)

    def model_times(self, timesteps: Tensor, ctx: GeneratorInferContext, dtype: torch.dtype) -> Tensor:
        """0 to 1000, unrounded: the reference embeds them in float32."""
        return timesteps


SD3 = register_generator_def(
    GeneratorDef(
        model_key=ModelKey.SD3,
        text=SD3TextHandler(),
        latent=SD3LatentHandler(),
        denoise=SD3DenoiseHandler(),
        capabilities=Capabilities(image_strength=True, skip_layers=True, dtypes=("float32", "bfloat16", "float16")),
    )
)
