"""FLUX.1: conditioning from T5, CLIP and images, 2x2-packed latents, resolution-dependent flow schedule."""

from __future__ import annotations

import numpy as np
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
from kdit.keys import ModelKey, TensorKey
from kdit.models.flux.latents import pack, unpack
from kdit.models.flux.network import FluxNetwork
from kdit.models.flux.references import reference_tokens
from kdit.models.rows import Cond

MAX_SHIFT = 1.15  # of the schedule, where the scheduler's config lacks it


class FluxTextHandler(TextHandler):
    """T5 tokens as text, CLIP's pooled state and the guidance value as vectors."""

    def conditioning(self, encoded: list[Tensor], ctx: GeneratorInferContext) -> Cond:
        """``encoded``: T5 hidden states [B, Lt, D], CLIP pooled state [B, D]."""
        network = flux_network(ctx)
        widths = (network.params.joint_attention_dim, network.params.pooled_projection_dim)
        shapes = [tuple(t.shape) for t in encoded]
        if [len(shape) for shape in shapes] != [3, 2] or (shapes[0][-1], shapes[1][-1]) != widths:
            raise InputError(
                f"FLUX.1 text is [T5 states [B, L, {widths[0]}], CLIP pooled [B, {widths[1]}]], got shapes "
                f"{', '.join(map(str, shapes))}"
            )
        txt, pooled = (t.to(ctx.device, network.dtype) for t in encoded)
        guidance = torch.full((txt.shape[0],), ctx.sample_config.guidance_scale or 0.0, device=ctx.device)
        images = {key: value.to(ctx.device) for key, value in self.images(ctx).items()}
        return {"txt": txt, "pooled": pooled, "guidance": guidance, **images}

    def images(self, ctx: GeneratorInferContext) -> Cond:
        """Conditioning from AUX_LATENT, if the model takes any."""
        return {}


class FluxChannelsTextHandler(FluxTextHandler):
    """Fill and Control: latents that join those of the picture in every forward, as channels of each token."""

    def images(self, ctx: GeneratorInferContext) -> Cond:
        """AUX_LATENT [B, c, H, W] or a list of such, together as wide as the network expects."""
        network, aux = flux_network(ctx), ctx.aux_latent
        wanted = (network.params.in_channels - network.params.out_channels) // 4
        batch, _, height, width = ctx.base_latent.latent.shape
        given = [] if aux is None else aux.latent if isinstance(aux.latent, list) else [aux.latent]
        shapes = [tuple(tensor.shape) for tensor in given]
        if any(len(shape) != 4 or (shape[0], *shape[2:]) != (batch, height, width) for shape in shapes) or (
            sum(shape[1] for shape in shapes) != wanted
        ):
            raise InputError(
                f"AUX_LATENT of this FLUX.1 model must be [{batch}, c, {height}, {width}] with {wanted} channels in "
                f"all, got {', '.join(map(str, shapes)) or 'none'}"
            )
        return {"channels": pack(torch.cat([tensor.to(network.dtype) for tensor in given], dim=1))}


class FluxReferencesTextHandler(FluxTextHandler):
    """Kontext: latents of reference pictures of any sizes, as further tokens."""

    def images(self, ctx: GeneratorInferContext) -> Cond:
        """AUX_LATENT: a list of [1, C, h, w]; without one it is text to image."""
        aux, num_samples = ctx.aux_latent, ctx.num_samples
        if aux is None:
            return {}
        network = flux_network(ctx)
        channels = network.params.in_channels // 4
        pictures = aux.latent if isinstance(aux.latent, list) else list(aux.latent.split(1))
        shapes = [tuple(tensor.shape) for tensor in pictures]
        if any(len(s) != 4 or s[:2] != (1, channels) or s[2] % 2 or s[3] % 2 for s in shapes):
            raise InputError(
                f"AUX_LATENT of FLUX.1 Kontext must be latents [1, {channels}, h, w] of even height and width, "
                f"got {', '.join(map(str, shapes))}"
            )
        tokens = reference_tokens([[pictures[i] for i in own] for own in aux.of_samples(num_samples)])
        return {} if tokens is None else {"ref": tokens.tokens.to(network.dtype), "ref_ids": tokens.ids}


def flux_network(ctx: GeneratorInferContext) -> FluxNetwork:
    """The network of a FLUX.1 model."""
    network = next(iter(ctx.networks.values()))
    assert isinstance(network, FluxNetwork)
    return network


class FluxLatentHandler(ImageLatentHandler):
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
        config = scheduler.config
        spacing: dict[str, object] = {"sigmas": np.linspace(1.0, 1 / num_steps, num_steps)}
        if config.get("use_flow_sigmas"):  # the scheduler spaces them itself
            spacing = {"num_inference_steps": num_steps}
        if config.get("use_dynamic_shifting"):
            _, height, width = noise_shape
            spacing["mu"] = flow_shift(config, (height // 2) * (width // 2), max_shift=MAX_SHIFT)
        scheduler.set_timesteps(**spacing)

    def model_times(self, timesteps: Tensor, ctx: GeneratorInferContext, dtype: torch.dtype) -> Tensor:
        """Times 0 to 1. The reference rounds the timestep to the latents' dtype before it divides."""
        return timesteps.to(dtype) / 1000


TEXT_INPUTS = Capabilities().inputs


def _definition(key: ModelKey, text: FluxTextHandler, *, takes_aux: bool, image_strength: bool) -> GeneratorDef:
    return GeneratorDef(
        model_key=key,
        text=text,
        latent=FluxLatentHandler(),
        denoise=FluxDenoiseHandler(),
        capabilities=Capabilities(
            inputs=(*TEXT_INPUTS, TensorKey.AUX_LATENT) if takes_aux else TEXT_INPUTS,
            embedded_guidance=True,
            image_strength=image_strength,
            dtypes=("float32", "bfloat16", "float16"),
        ),
    )


FLUX1 = register_generator_def(
    _definition(ModelKey.FLUX1, FluxTextHandler(), takes_aux=False, image_strength=True),
)
FLUX1_FILL = register_generator_def(
    _definition(ModelKey.FLUX1_FILL, FluxChannelsTextHandler(), takes_aux=True, image_strength=True)
)
FLUX1_CONTROL = register_generator_def(
    _definition(ModelKey.FLUX1_CONTROL, FluxChannelsTextHandler(), takes_aux=True, image_strength=False)
)
FLUX1_KONTEXT = register_generator_def(
    _definition(ModelKey.FLUX1_KONTEXT, FluxReferencesTextHandler(), takes_aux=True, image_strength=False)
)
