"""FLUX.1: its graphs, where its models lie, its defaults and the form of its latents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kdit.errors import InputError
from kdit.keys import InferNodeType, IONodeType, ModelKey, PipelineKey
from kdit.models.checkpoint import Checkpoint
from kdit.models.flux.config import FluxParams
from kdit.models.flux.latents import pack, unpack
from kdit.models.rows import LatentShape
from kdit.pipelines.context_builders.flux import (
    FluxContextBuilder,
    FluxControlContextBuilder,
    FluxControlExtraInputs,
    FluxExtraInputs,
    FluxFillContextBuilder,
    FluxFillExtraInputs,
    FluxKontextContextBuilder,
    FluxKontextExtraInputs,
)
from kdit.pipelines.extra_inputs import ExtraInputs, MediaInputs
from kdit.pipelines.family_pipeline import Component, FamilyPipeline, never
from kdit.pipelines.generate_inputs import PipelineGenerateInputs
from kdit.pipelines.image_sizes import size_like
from kdit.pipelines.kl_vae import check_kl_scaling, decoding_floor, kl_latent_shape, pixels_per_latent
from kdit.pipelines.part_widths import check_width
from kdit.pipelines.pipeline_def import PipelineDef
from kdit.pipelines.pipeline_def_builder import PipelineDefBuilder
from kdit.pipelines.pipeline_defaults import PipelineDefaults

PATCH = 2  # latents per token along each side
FUSED_WIDTHS = 8  # hidden, q, k, v and the MLP's 4, in hidden sizes
TITLE = "FLUX.1"


class FluxLatentForm:
    """Grid latents (C, H/f, W/f) on the pins; packed tokens [B, L, 4 C] in public."""

    def shape(self, checkpoint: Checkpoint, size: tuple[int, int], frame_num: int | None) -> LatentShape:
        """(C, H/f, W/f) for a picture of ``size`` (width, height)."""
        return kl_latent_shape(checkpoint, size)

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


def defaults(checkpoint: Checkpoint) -> PipelineDefaults:
    """The published settings of FLUX.1: dev is guidance-distilled, schnell is made for four steps."""
    check_kl_scaling(checkpoint)
    params = FluxParams.from_config(checkpoint.component("transformer").config)
    check_width(checkpoint, ("vae",), "latent_channels", params.out_channels // PATCH**2, "a quarter of out_channels")
    check_width(checkpoint, ("text_encoder",), "hidden_size", params.pooled_projection_dim, "pooled_projection_dim")
    check_width(checkpoint, ("text_encoder_2",), "d_model", params.joint_attention_dim, "joint_attention_dim")
    distilled = params.guidance_embeds
    return PipelineDefaults(
        size=(1024, 1024),
        size_multiple=pixels_per_latent(checkpoint) * PATCH,
        steps=28 if distilled else 4,
        guidance_scale=3.5 if distilled else None,
        cfg_scale=1.0,
        strength=0.6,
        max_sequence_length=512,
        max_sequence_limit=512,
    )


def fill_defaults(checkpoint: Checkpoint) -> PipelineDefaults:
    """Fill has a high guidance of its own, and repaints from pure noise."""
    usual = defaults(checkpoint)
    guidance = None if usual.guidance_scale is None else 30.0
    return replace(usual, steps=50, guidance_scale=guidance, strength=1.0)


def edit_defaults(checkpoint: Checkpoint) -> PipelineDefaults:
    """Control and Kontext always begin at noise."""
    return replace(defaults(checkpoint), strength=None)


def memory_floor(checkpoint: Checkpoint, inputs: PipelineGenerateInputs, rows: int) -> int:
    """Bytes of the larger of: one block's tokens with their fused projections, one decoded sample's first features.

    Both are less than a request really holds, so nothing that could run is refused.
    """
    assert inputs.runtime_config.size is not None
    width, height = inputs.runtime_config.size
    dim = FluxParams.from_config(checkpoint.component("transformer").config).hidden_size
    itemsize: int = getattr(torch, inputs.execute_config.dtype).itemsize
    pixels = pixels_per_latent(checkpoint) * PATCH
    tokens = (width // pixels) * (height // pixels)
    decoded = inputs.runtime_config.output_type == "decoded"
    return max(
        rows * tokens * dim * FUSED_WIDTHS * itemsize,
        decoding_floor(checkpoint, (width, height), itemsize) if decoded else 0,
    )


def size_of_image(extra: ExtraInputs, given: PipelineDefaults) -> tuple[int, int] | None:
    """That of the (first) image that is changed or followed, at most one megapixel."""
    files = extra.files()
    return size_like(files[0], given.size_multiple) if files else None


def size_of_reference(extra: ExtraInputs, given: PipelineDefaults) -> tuple[int, int] | None:
    """The shape of the first reference."""
    assert isinstance(extra, FluxKontextExtraInputs)
    files = extra.files()
    return size_like(files[0], given.size_multiple, area=extra.max_area, enlarge=True) if files else None


def has_image(extra: ExtraInputs) -> bool:
    """Whether an image is given."""
    assert isinstance(extra, FluxExtraInputs | FluxFillExtraInputs)
    return extra.image_path is not None


def text_to_image_media(media: MediaInputs) -> ExtraInputs:
    """An image to change, or one per sample."""
    media.refuse(TITLE, "images")
    return FluxExtraInputs(image_path=one_or_list(media.images))


def fill_media(media: MediaInputs) -> ExtraInputs:
    """An image, or one per sample, and its mask."""
    media.refuse(f"{TITLE} Fill", "images", "mask")
    return FluxFillExtraInputs(image_path=one_or_list(media.images), mask_path=media.mask)


def control_media(media: MediaInputs) -> ExtraInputs:
    """A control image."""
    media.refuse(f"{TITLE} Control", "control")
    return FluxControlExtraInputs(control_path=media.control)


def kontext_media(media: MediaInputs) -> ExtraInputs:
    """References, all of them for every sample."""
    media.refuse(f"{TITLE} Kontext", "images")
    return FluxKontextExtraInputs(image_paths=one_or_list(media.images))


def one_or_list(paths: Sequence[str]) -> str | list[str] | None:
    """One path as itself."""
    return (paths[0] if len(paths) == 1 else list(paths)) if paths else None


def graph(key: PipelineKey, network: ModelKey, *, starts: bool = False, adds: bool = False) -> PipelineDef:
    """Text and an empty latent into the loop, its latents into the autoencoder, out to caller and file.

    ``starts``: the loop may begin at an image, of which the result may keep parts. ``adds``: an image is encoded
    beside the latents.
    """
    b = PipelineDefBuilder(key)
    t5, clip = b.add_loader(ModelKey.T5TextEncoder), b.add_loader(ModelKey.CLIPTextEncoder)
    loader, vae = b.add_loader(network), b.add_loader(ModelKey.VAE_KL)
    text = b.add_infer(InferNodeType.TEXT_ENCODE, ModelKey.T5TextEncoder, models=(ModelKey.CLIPTextEncoder,))
    read = b.add_io(IONodeType.READ_IMAGE) if starts or adds else None
    masks = b.add_io(IONodeType.READ_IMAGE) if starts and adds else None
    shape = b.add_infer(InferNodeType.VAE_COMPUTE_SHAPE, ModelKey.VAE_KL)
    generate = b.add_infer(InferNodeType.GENERATE, network)
    decode = b.add_infer(InferNodeType.VAE_DECODE, ModelKey.VAE_KL)
    picture = decode.IMAGE
    b.connect(
        (t5.T5TextEncoder, text.T5TextEncoder),
        (clip.CLIPTextEncoder, text.CLIPTextEncoder),
        (loader.pin(network), generate.pin(network)),
        (vae.VAE_KL, shape.VAE_KL),
        (vae.VAE_KL, decode.VAE_KL),
        (text.POSITIVE, generate.POSITIVE),
        (text.NEGATIVE, generate.NEGATIVE),
        (shape.BASE_LATENT, generate.BASE_LATENT),
        (generate.LATENTS, decode.LATENTS),
    )
    if read is not None and adds:
        images = b.add_infer(InferNodeType.VAE_ENCODE_IMAGES, ModelKey.VAE_KL)
        b.connect((vae.VAE_KL, images.VAE_KL), (read.IMAGE, images.IMAGE), (images.AUX_LATENT, generate.AUX_LATENT))
        if masks is not None:
            b.connect((masks.IMAGE, images.MASK))
    if read is not None and starts:
        encode = b.add_infer(InferNodeType.VAE_ENCODE_SPATIAL, ModelKey.VAE_KL)
        composite = b.add_infer(InferNodeType.COMPOSITE)
        b.connect(
            (vae.VAE_KL, encode.VAE_KL),
            (read.IMAGE, encode.IMAGE),
            (encode.BASE_LATENT, shape.BASE_LATENT),
            (decode.IMAGE, composite.IMAGE),
            (read.IMAGE, composite.START_IMG),
        )
        if masks is not None:
            b.connect((masks.IMAGE, composite.MASK))
        picture = composite.IMAGE
    save = b.add_io(IONodeType.SAVE_IMAGE)
    fetch_latents, fetch_image = b.add_io(IONodeType.FETCH_TENSOR), b.add_io(IONodeType.FETCH_TENSOR)
    b.connect(
        (generate.LATENTS, fetch_latents.LATENTS),
        (picture, fetch_image.IMAGE),
        (picture, save.IMAGE),
    )
    return b.build()


def pipeline(
    key: PipelineKey,
    network: ModelKey,
    *,
    starts: bool = False,
    adds: bool = False,
    defaults: Callable[[Checkpoint], PipelineDefaults],
    context_builder: type[FluxContextBuilder],
    from_media: Callable[[MediaInputs], ExtraInputs],
    default_size: Callable[[ExtraInputs, PipelineDefaults], tuple[int, int] | None] = size_of_image,
) -> FamilyPipeline:
    """What the pipelines share. ``starts`` and ``adds`` as in ``graph``."""

    def build(checkpoint: Checkpoint) -> PipelineDef:
        return graph(key, network, starts=starts, adds=adds)

    return FamilyPipeline(
        key=key,
        network=network,
        vae=ModelKey.VAE_KL,
        components={
            ModelKey.T5TextEncoder: Component("text_encoder_2", "tokenizer_2"),
            ModelKey.CLIPTextEncoder: Component("text_encoder", "tokenizer"),
            network: Component("transformer"),
            ModelKey.VAE_KL: Component("vae"),
        },
        build=build,
        defaults=defaults,
        latents=FluxLatentForm(),
        memory_floor=memory_floor,
        context_builder=context_builder,
        extra_inputs=context_builder.takes,
        from_media=from_media,
        changes_image=has_image if starts else never,
        default_size=default_size,
    )


PIPELINES = (
    pipeline(
        PipelineKey.FLUX1_T2I,
        ModelKey.FLUX1,
        starts=True,
        defaults=defaults,
        context_builder=FluxContextBuilder,
        from_media=text_to_image_media,
    ),
    pipeline(
        PipelineKey.FLUX1_FILL,
        ModelKey.FLUX1_FILL,
        starts=True,
        adds=True,
        defaults=fill_defaults,
        context_builder=FluxFillContextBuilder,
        from_media=fill_media,
    ),
    pipeline(
        PipelineKey.FLUX1_CONTROL,
        ModelKey.FLUX1_CONTROL,
        adds=True,
        defaults=edit_defaults,
        context_builder=FluxControlContextBuilder,
        from_media=control_media,
    ),
    pipeline(
        PipelineKey.FLUX1_KONTEXT,
        ModelKey.FLUX1_KONTEXT,
        adds=True,
        defaults=edit_defaults,
        context_builder=FluxKontextContextBuilder,
        from_media=kontext_media,
        default_size=size_of_reference,
    ),
)
