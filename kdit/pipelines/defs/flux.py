"""FLUX.1: the text-to-image graph, where its models lie, its defaults and the form of its latents."""

from __future__ import annotations

import torch
from torch import Tensor

from kdit.errors import CheckpointError, InputError
from kdit.keys import InferNodeType, IONodeType, ModelKey, PipelineKey
from kdit.models.checkpoint import Checkpoint
from kdit.models.flux.config import FluxParams
from kdit.models.flux.latents import pack, unpack
from kdit.models.rows import LatentShape
from kdit.models.vae_latents import spatial_factor
from kdit.pipelines.context_builders.flux import FluxContextBuilder
from kdit.pipelines.family_pipeline import Component, FamilyPipeline
from kdit.pipelines.generate_inputs import PipelineGenerateInputs
from kdit.pipelines.pipeline_def import PipelineDef
from kdit.pipelines.pipeline_def_builder import PipelineDefBuilder
from kdit.pipelines.pipeline_defaults import PipelineDefaults

PATCH = 2  # latents per token along each side
FUSED_WIDTHS = 8  # hidden, q, k, v and the MLP's 4, in hidden sizes


class FluxLatentForm:
    """Grid latents (C, H/f, W/f) on the pins; packed tokens [B, L, 4 C] in public."""

    def shape(self, checkpoint: Checkpoint, size: tuple[int, int], frame_num: int | None) -> LatentShape:
        """(C, H/f, W/f) for a picture of ``size`` (width, height)."""
        config = checkpoint.component("vae").config
        channels, factor = config.get("latent_channels"), vae_factor(checkpoint)
        if not isinstance(channels, int):
            raise CheckpointError(f"vae/config.json: latent_channels must be a whole number, got {channels!r}")
        width, height = size
        return channels, height // factor, width // factor

    def to_public(self, latents: Tensor) -> Tensor:
        """Pack."""
        return pack(latents)

    def from_public(self, latents: Tensor, shape: LatentShape) -> Tensor:
        """Unpack, or leave a grid as it is."""
        channels, height, width = shape
        packed = (height * width // PATCH**2, channels * PATCH**2)
        if tuple(latents.shape[1:]) == packed:
            return unpack(latents, height, width)
        if tuple(latents.shape[1:]) == tuple(shape):
            return latents
        raise InputError(
            f"latents have shape {tuple(latents.shape)}, expected [B, {packed[0]}, {packed[1]}] or "
            f"[B, {channels}, {height}, {width}]"
        )


def vae_factor(checkpoint: Checkpoint) -> int:
    """Pixels per latent along each side."""
    channels = checkpoint.component("vae").config.get("block_out_channels")
    if not isinstance(channels, list | tuple) or not channels:
        raise CheckpointError(f"vae/config.json: block_out_channels must be a list, got {channels!r}")
    return spatial_factor(channels)


def defaults(checkpoint: Checkpoint) -> PipelineDefaults:
    """The published settings of FLUX.1: dev is guidance-distilled, schnell is made for four steps."""
    for name in ("scaling_factor", "shift_factor"):  # read only when pictures are decoded
        value = checkpoint.component("vae").config.get(name)
        if value is not None and not isinstance(value, int | float):
            raise CheckpointError(f"vae/config.json: {name} must be a number, got {value!r}")
    distilled = FluxParams.from_config(checkpoint.component("transformer").config).guidance_embeds
    return PipelineDefaults(
        size=(1024, 1024),
        size_multiple=vae_factor(checkpoint) * PATCH,
        steps=28 if distilled else 4,
        guidance_scale=3.5 if distilled else None,
        cfg_scale=1.0,
        max_sequence_length=512,
        max_sequence_limit=512,
    )


def memory_floor(checkpoint: Checkpoint, inputs: PipelineGenerateInputs) -> int:
    """Bytes of the larger of: one block's tokens with their fused projections, one decoded sample's first features.

    Both are less than a request really holds, so nothing that could run is refused.
    """
    assert inputs.runtime_config.size is not None
    width, height = inputs.runtime_config.size
    dim = FluxParams.from_config(checkpoint.component("transformer").config).hidden_size
    itemsize: int = getattr(torch, inputs.execute_config.dtype).itemsize
    rows = 1 if inputs.execute_config.batch_invariant else inputs.num_samples * (1 + bool(inputs.negative_prompts))
    tokens = (width // (vae_factor(checkpoint) * PATCH)) * (height // (vae_factor(checkpoint) * PATCH))
    features = checkpoint.component("vae").config.get("block_out_channels")
    assert isinstance(features, list | tuple)
    decoded = 2 * width * height * int(features[0]) * itemsize if inputs.runtime_config.output_type == "decoded" else 0
    return max(rows * tokens * dim * FUSED_WIDTHS * itemsize, decoded)


def build() -> PipelineDef:
    """Text and an empty latent into the loop, its latents into the autoencoder, out to caller and file."""
    b = PipelineDefBuilder(PipelineKey.FLUX1_T2I)
    t5, clip = b.add_loader(ModelKey.T5TextEncoder), b.add_loader(ModelKey.CLIPTextEncoder)
    network, vae = b.add_loader(ModelKey.FLUX1), b.add_loader(ModelKey.VAE_KL)
    text = b.add_infer(InferNodeType.TEXT_ENCODE, ModelKey.T5TextEncoder, models=(ModelKey.CLIPTextEncoder,))
    shape = b.add_infer(InferNodeType.VAE_COMPUTE_SHAPE, ModelKey.VAE_KL)
    generate = b.add_infer(InferNodeType.GENERATE, ModelKey.FLUX1)
    decode = b.add_infer(InferNodeType.VAE_DECODE, ModelKey.VAE_KL)
    save = b.add_io(IONodeType.SAVE_IMAGE)
    fetch_latents, fetch_image = b.add_io(IONodeType.FETCH_TENSOR), b.add_io(IONodeType.FETCH_TENSOR)
    b.connect(
        (t5.T5TextEncoder, text.T5TextEncoder),
        (clip.CLIPTextEncoder, text.CLIPTextEncoder),
        (network.FLUX1, generate.FLUX1),
        (vae.VAE_KL, shape.VAE_KL),
        (vae.VAE_KL, decode.VAE_KL),
        (text.POSITIVE, generate.POSITIVE),
        (text.NEGATIVE, generate.NEGATIVE),
        (shape.BASE_LATENT, generate.BASE_LATENT),
        (generate.LATENTS, decode.LATENTS),
        (generate.LATENTS, fetch_latents.LATENTS),
        (decode.IMAGE, fetch_image.IMAGE),
        (decode.IMAGE, save.IMAGE),
    )
    return b.build()


PIPELINES = (
    FamilyPipeline(
        key=PipelineKey.FLUX1_T2I,
        network=ModelKey.FLUX1,
        vae=ModelKey.VAE_KL,
        components={
            ModelKey.T5TextEncoder: Component("text_encoder_2", "tokenizer_2"),
            ModelKey.CLIPTextEncoder: Component("text_encoder", "tokenizer"),
            ModelKey.FLUX1: Component("transformer"),
            ModelKey.VAE_KL: Component("vae"),
        },
        build=build,
        defaults=defaults,
        latents=FluxLatentForm(),
        memory_floor=memory_floor,
        context_builder=FluxContextBuilder,
    ),
)
