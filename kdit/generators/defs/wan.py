"""Wan 2.1 and 2.2: text of UMT5, given frames, two experts, latents in float32, the scheduler's own schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kdit.errors import InputError
from kdit.generators.capabilities import Capabilities
from kdit.generators.denoise_state import Scheduler
from kdit.generators.generator_context import BaseLatent, GeneratorInferContext
from kdit.generators.generator_def import GeneratorDef
from kdit.generators.handlers import DenoiseHandler, LatentHandler, TextHandler
from kdit.generators.registry import register_generator_def
from kdit.keys import ModelKey, TensorKey
from kdit.models.rows import Cond
from kdit.models.video_latents import first_frame_mask
from kdit.models.wan.config import WanParams
from kdit.models.wan.network import WanNetwork


class WanTextHandler(TextHandler):
    """Text to video: UMT5's states, zero after the prompt's end."""

    def conditioning(self, encoded: list[Tensor], ctx: GeneratorInferContext) -> Cond:
        """``encoded``: UMT5's states [B, L, D]."""
        network = wan_network(ctx)
        width, shapes = network.params.txt_dim, [tuple(tensor.shape) for tensor in encoded]
        if len(shapes) != 1 or len(shapes[0]) != 3 or shapes[0][-1] != width:
            raise InputError(f"Wan text is [UMT5 states [B, L, {width}]], got shapes {', '.join(map(str, shapes))}")
        return {"txt": encoded[0].to(ctx.device, network.dtype), **self.frames(ctx)}

    def frames(self, ctx: GeneratorInferContext) -> Cond:
        """Conditioning from BASE_LATENT and AUX_LATENT, where the network reads any."""
        return {}


class WanFramesTextHandler(WanTextHandler):
    """Image to video: encoded frames, and which of them are given, beside the noise in every forward; tokens of an
    image encoder where the network reads such.
    """

    def frames(self, ctx: GeneratorInferContext) -> Cond:
        """BASE_LATENT [B, C, F, H, W] with its mask [B, c, F, H, W]; AUX_LATENT [B, tokens, image_dim]."""
        network, base = wan_network(ctx), ctx.base_latent
        assert base.mask is not None
        given = torch.cat((base.mask.to(ctx.device, network.dtype), base.latent.to(ctx.device, network.dtype)), dim=1)
        if network.params.image_dim is None:
            if ctx.aux_latent is not None:
                raise InputError("AUX_LATENT: this Wan model reads no tokens of an image encoder")
            return {"frames": given}
        return {"frames": given, "image": _image_tokens(ctx, network)}


def _image_tokens(ctx: GeneratorInferContext, network: WanNetwork) -> Tensor:
    width, aux = network.params.image_dim, ctx.aux_latent
    tokens = None if aux is None else aux.latent
    if isinstance(tokens, list):
        tokens = tokens[0] if len(tokens) == 1 else None
    if tokens is None or tokens.ndim != 3 or (tokens.shape[0], tokens.shape[2]) != (ctx.num_samples, width):
        got = "none" if tokens is None else str(tuple(tokens.shape))
        raise InputError(f"AUX_LATENT of this Wan model is one tensor [{ctx.num_samples}, tokens, {width}], got {got}")
    return tokens.to(ctx.device, network.dtype)


def wan_network(ctx: GeneratorInferContext) -> WanNetwork:
    """The network, of two experts the first: they read the same."""
    network = next(iter(ctx.networks.values()))
    assert isinstance(network, WanNetwork)
    return network


class WanLatentHandler(LatentHandler):
    """Latents [B, C, F, H, W] as they are, float32 whatever the network computes in."""

    def noise_dtype(self, network_dtype: torch.dtype) -> torch.dtype:
        """float32."""
        return torch.float32

    def preprocess_base_latent(self, base: BaseLatent, ctx: GeneratorInferContext) -> BaseLatent:
        """Text to video reads the shape alone; content would be lost without a word."""
        _check_channels(base, ctx)
        if base.mask is not None or bool(base.latent.any()):
            raise InputError("BASE_LATENT holds frames, but this Wan model makes videos of text alone: feed zeros")
        return base

    def pack(self, latents: Tensor) -> Tensor:
        """Nothing to do."""
        return latents

    def unpack(self, latents: Tensor, noise_shape: tuple[int, ...]) -> Tensor:
        """Nothing to do."""
        return latents


class WanFramesLatentHandler(WanLatentHandler):
    """Image to video. Encoded frames without a mask: the first is given."""

    def preprocess_base_latent(self, base: BaseLatent, ctx: GeneratorInferContext) -> BaseLatent:
        """The mask has as many channels as the network reads beside the noise and the encoded frames."""
        params = _check_channels(base, ctx)
        channels = params.in_channels - params.out_channels - base.latent.shape[1]
        mask = first_frame_mask(base.latent, channels) if base.mask is None else base.mask
        _check_mask(mask, (base.latent.shape[0], channels, *base.latent.shape[2:]))
        return BaseLatent(base.latent, mask)


class WanPinnedLatentHandler(WanLatentHandler):
    """Text or image to video in one network: a given first frame stands in the latents themselves."""

    def preprocess_base_latent(self, base: BaseLatent, ctx: GeneratorInferContext) -> BaseLatent:
        """Zeros: nothing is given. Frames behind the given one are not read, so they must be zero."""
        _check_channels(base, ctx)
        if base.mask is not None:
            _check_mask(base.mask, (base.latent.shape[0], 1, *base.latent.shape[2:]))
        elif bool(base.latent.any()):
            base = BaseLatent(base.latent, first_frame_mask(base.latent, 1))
        if bool(base.latent[:, :, 1:].any()) or (base.mask is not None and bool(base.mask[:, :, 1:].any())):
            raise InputError("BASE_LATENT holds frames after the first, of which this Wan model takes none: feed zeros")
        return base

    def pinned_frames(self, ctx: GeneratorInferContext) -> Tensor | None:
        """The first latent frame [B, C, 1, H, W]."""
        base = ctx.base_latent
        return None if base.mask is None else base.latent[:, :, :1]


def _check_channels(base: BaseLatent, ctx: GeneratorInferContext) -> WanParams:
    params, shape = wan_network(ctx).params, tuple(base.latent.shape)
    if len(shape) != 5 or shape[1] != params.out_channels:
        raise InputError(f"BASE_LATENT of this Wan model is [B, {params.out_channels}, F, H, W], got {shape}")
    return params


def _check_mask(mask: Tensor, expected: Sequence[int]) -> None:
    if tuple(mask.shape) != tuple(expected):
        raise InputError(f"the mask of BASE_LATENT has shape {tuple(mask.shape)}, expected {tuple(expected)}")


class WanDenoiseHandler(DenoiseHandler):
    """The scheduler spaces the steps itself."""

    def set_timesteps(self, scheduler: Scheduler, num_steps: int, noise_shape: tuple[int, ...]) -> None:
        """``num_steps`` timesteps from noise to video."""
        scheduler.set_timesteps(num_inference_steps=num_steps)

    def model_times(self, timesteps: Tensor, ctx: GeneratorInferContext, dtype: torch.dtype) -> Tensor:
        """0 to 1000, as the scheduler has them."""
        return timesteps


class WanPinnedDenoiseHandler(WanDenoiseHandler):
    """A given first frame is clean from the start: it stands at time 0."""

    def model_times(self, timesteps: Tensor, ctx: GeneratorInferContext, dtype: torch.dtype) -> Tensor:
        """With a first frame [steps, 2]: its time and that of all others."""
        if ctx.base_latent.mask is None:
            return timesteps
        clean = torch.zeros_like(timesteps)
        return clean if ctx.base_latent.latent.shape[2] == 1 else torch.stack((clean, timesteps), dim=1)


@dataclass(frozen=True)
class WanExpertsDenoiseHandler(WanDenoiseHandler):
    """Two experts: the first for the noisy steps, the second, with a guidance scale of its own, for the others."""

    high: ModelKey
    low: ModelKey

    def select_network(self, timestep: float, ctx: GeneratorInferContext) -> ModelKey:
        """The first expert runs at timesteps from the boundary up."""
        assert ctx.expert_boundary is not None
        return self.high if timestep >= ctx.expert_boundary else self.low

    def cfg_scale(self, network: ModelKey, ctx: GeneratorInferContext) -> float:
        """``cfg_scale_2`` for the second expert. Whether there is guidance at all is decided by ``cfg_scale``."""
        sample = ctx.sample_config
        scale = sample.cfg_scale_2 if network is self.low and sample.cfg_scale_2 is not None else sample.cfg_scale
        assert scale is not None
        return scale


TEXT_INPUTS = (TensorKey.POSITIVE, TensorKey.NEGATIVE, TensorKey.BASE_LATENT, TensorKey.NOISE)


def _definition(key: ModelKey, latent: WanLatentHandler, denoise: WanDenoiseHandler) -> GeneratorDef:
    takes_frames = isinstance(latent, WanFramesLatentHandler)
    return GeneratorDef(
        model_key=key,
        text=WanFramesTextHandler() if takes_frames else WanTextHandler(),
        latent=latent,
        denoise=denoise,
        capabilities=Capabilities(
            inputs=(*TEXT_INPUTS, TensorKey.AUX_LATENT) if takes_frames else TEXT_INPUTS,
            dtypes=("float32", "bfloat16", "float16"),
        ),
    )


T2V_EXPERTS = WanExpertsDenoiseHandler(ModelKey.Wan2_2_T2V_14B, ModelKey.Wan2_2_T2V_14B_LOW)
I2V_EXPERTS = WanExpertsDenoiseHandler(ModelKey.Wan2_2_I2V_14B, ModelKey.Wan2_2_I2V_14B_LOW)
for _key, _latent, _denoise in (
    (ModelKey.Wan2_1_T2V, WanLatentHandler(), WanDenoiseHandler()),
    (ModelKey.Wan2_1_I2V, WanFramesLatentHandler(), WanDenoiseHandler()),
    (ModelKey.Wan2_2_T2V_14B, WanLatentHandler(), T2V_EXPERTS),
    (ModelKey.Wan2_2_I2V_14B, WanFramesLatentHandler(), I2V_EXPERTS),
    (ModelKey.Wan2_2_TI2V_5B, WanPinnedLatentHandler(), WanPinnedDenoiseHandler()),
):
    register_generator_def(_definition(_key, _latent, _denoise))
