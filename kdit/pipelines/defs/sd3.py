"""Stable Diffusion 3 and 3.5: the graph with and without T5, where its models lie, its defaults."""

from __future__ import annotations

import torch

from kdit.errors import CheckpointError
from kdit.keys import InferNodeType, IONodeType, ModelKey, PipelineKey
from kdit.models.checkpoint import Checkpoint
from kdit.models.rows import LatentShape
from kdit.models.sd3.config import SD3Params
from kdit.pipelines.context_builders.sd3 import SD3ContextBuilder, SD3ExtraInputs
from kdit.pipelines.extra_inputs import ExtraInputs, MediaInputs
from kdit.pipelines.family_pipeline import Component, FamilyPipeline
from kdit.pipelines.generate_inputs import PipelineGenerateInputs
from kdit.pipelines.grid_latents import GridLatents
from kdit.pipelines.image_sizes import size_like
from kdit.pipelines.kl_vae import check_kl_scaling, decoding_floor, kl_latent_shape, pixels_per_latent
from kdit.pipelines.part_widths import check_width
from kdit.pipelines.pipeline_def import PipelineDef
from kdit.pipelines.pipeline_def_builder import PipelineDefBuilder
from kdit.pipelines.pipeline_defaults import PipelineDefaults

MLP_WIDTHS = 6  # hidden, modulated and the MLP's 4, in hidden sizes
COMPONENTS = {
    ModelKey.CLIPTextEncoder: Component("text_encoder", "tokenizer"),
    ModelKey.CLIPTextEncoder2: Component("text_encoder_2", "tokenizer_2"),
    ModelKey.T5TextEncoder: Component("text_encoder_3", "tokenizer_3", optional=True),
    ModelKey.SD3: Component("transformer"),
    ModelKey.VAE_KL: Component("vae"),
}


class SD3LatentForm(GridLatents):
    """Grid latents (C, H/f, W/f), on the pins and in public."""

    def shape(self, checkpoint: Checkpoint, size: tuple[int, int], frame_num: int | None) -> LatentShape:
        """(C, H/f, W/f) for a picture of ``size`` (width, height)."""
        return kl_latent_shape(checkpoint, size)


def params_of(checkpoint: Checkpoint) -> SD3Params:
    """The sizes of the checkpoint's network."""
    return SD3Params.from_config(checkpoint.component("transformer").config)


def defaults(checkpoint: Checkpoint) -> PipelineDefaults:
    """The published settings of SD3 and, told apart by their networks, of 3.5 large and 3.5 medium."""
    check_kl_scaling(checkpoint)
    params = params_of(checkpoint)
    check_width(checkpoint, ("vae",), "latent_channels", params.channels, "in_channels")
    clips = ("text_encoder", "text_encoder_2")
    check_width(checkpoint, clips, "projection_dim", params.pooled_dim, "pooled_projection_dim")
    check_width(checkpoint, ("text_encoder_3",), "d_model", params.txt_dim, "joint_attention_dim")
    factor = pixels_per_latent(checkpoint)
    max_side = params.max_grid * params.patch_size * factor
    latent_side = checkpoint.component("transformer").config.get("sample_size", 128)
    if not isinstance(latent_side, int) or latent_side < 1:
        raise CheckpointError(f"transformer/config.json: sample_size must be a positive number, got {latent_side!r}")
    side = min(latent_side * factor, max_side)
    steps, cfg_scale = (40, 4.5) if params.dual_layers else (28, 3.5) if params.qk_norm else (28, 7.0)
    return PipelineDefaults(
        size=(side, side),
        size_multiple=factor * params.patch_size,
        max_side=max_side,
        steps=steps,
        guidance_scale=None,
        cfg_scale=cfg_scale,
        strength=0.6,
        max_sequence_length=256,
        max_sequence_limit=512,
    )


def memory_floor(checkpoint: Checkpoint, inputs: PipelineGenerateInputs, rows: int) -> int:
    """Bytes of the larger of: one block's MLP of the image tokens, one decoded sample's last features."""
    assert inputs.runtime_config.size is not None
    params = params_of(checkpoint)
    itemsize: int = getattr(torch, inputs.execute_config.dtype).itemsize
    width, height = inputs.runtime_config.size
    pixels = pixels_per_latent(checkpoint) * params.patch_size
    tokens = (width // pixels) * (height // pixels)
    decoded = inputs.runtime_config.output_type == "decoded"
    return max(
        rows * tokens * params.dim * MLP_WIDTHS * itemsize,
        decoding_floor(checkpoint, (width, height), itemsize) if decoded else 0,
    )


def default_size(extra: ExtraInputs, given: PipelineDefaults) -> tuple[int, int] | None:
    """That of the (first) image, at most one megapixel and what the model can make, at the nearest multiples."""
    assert isinstance(extra, SD3ExtraInputs) and given.max_side is not None
    if not extra.image_path:
        return None
    first = extra.image_path if isinstance(extra.image_path, str) else extra.image_path[0]
    width, height = size_like(first, given.size_multiple)
    scale, multiple = min(1.0, given.max_side / max(width, height)), given.size_multiple
    width, height = (max(multiple, round(side * scale / multiple) * multiple) for side in (width, height))
    return width, height


def changes_image(extra: ExtraInputs) -> bool:
    """Whether an image is given."""
    assert isinstance(extra, SD3ExtraInputs)
    return extra.image_path is not None


def from_media(media: MediaInputs) -> ExtraInputs:
    """One image for all samples, or one for each."""
    media.refuse("Stable Diffusion 3", "images")
    return SD3ExtraInputs(image_path=media.images[0] if len(media.images) == 1 else list(media.images))


def build(checkpoint: Checkpoint) -> PipelineDef:
    """Text and an empty or encoded latent into the loop, its latents into the autoencoder, out to caller and file."""
    b = PipelineDefBuilder(PipelineKey.SD3_T2I)
    clip, clip_2 = b.add_loader(ModelKey.CLIPTextEncoder), b.add_loader(ModelKey.CLIPTextEncoder2)
    network, vae = b.add_loader(ModelKey.SD3), b.add_loader(ModelKey.VAE_KL)
    has_t5 = COMPONENTS[ModelKey.T5TextEncoder].folder in checkpoint.components
    more = (ModelKey.CLIPTextEncoder2, *((ModelKey.T5TextEncoder,) if has_t5 else ()))
    text = b.add_infer(InferNodeType.TEXT_ENCODE, ModelKey.CLIPTextEncoder, models=more)
    read = b.add_io(IONodeType.READ_IMAGE)
    encode = b.add_infer(InferNodeType.VAE_ENCODE_SPATIAL, ModelKey.VAE_KL)
    shape = b.add_infer(InferNodeType.VAE_COMPUTE_SHAPE, ModelKey.VAE_KL)
    generate = b.add_infer(InferNodeType.GENERATE, ModelKey.SD3)
    decode = b.add_infer(InferNodeType.VAE_DECODE, ModelKey.VAE_KL)
    composite = b.add_infer(InferNodeType.COMPOSITE)
    save = b.add_io(IONodeType.SAVE_IMAGE)
    fetch_latents, fetch_image = b.add_io(IONodeType.FETCH_TENSOR), b.add_io(IONodeType.FETCH_TENSOR)
    if has_t5:
        b.connect((b.add_loader(ModelKey.T5TextEncoder).T5TextEncoder, text.T5TextEncoder))
    b.connect(
        (clip.CLIPTextEncoder, text.CLIPTextEncoder),
        (clip_2.CLIPTextEncoder2, text.CLIPTextEncoder2),
        (network.SD3, generate.SD3),
        (vae.VAE_KL, encode.VAE_KL),
        (vae.VAE_KL, shape.VAE_KL),
        (vae.VAE_KL, decode.VAE_KL),
        (text.POSITIVE, generate.POSITIVE),
        (text.NEGATIVE, generate.NEGATIVE),
        (read.IMAGE, encode.IMAGE),
        (encode.BASE_LATENT, shape.BASE_LATENT),
        (shape.BASE_LATENT, generate.BASE_LATENT),
        (generate.LATENTS, decode.LATENTS),
        (generate.LATENTS, fetch_latents.LATENTS),
        (decode.IMAGE, composite.IMAGE),
        (read.IMAGE, composite.START_IMG),
        (composite.IMAGE, fetch_image.IMAGE),
        (composite.IMAGE, save.IMAGE),
    )
    return b.build()


PIPELINES = (
    FamilyPipeline(
        key=PipelineKey.SD3_T2I,
        network=ModelKey.SD3,
        vae=ModelKey.VAE_KL,
        components=COMPONENTS,
        build=build,
        defaults=defaults,
        latents=SD3LatentForm(),
        memory_floor=memory_floor,
        context_builder=SD3ContextBuilder,
        extra_inputs=SD3ExtraInputs,
        from_media=from_media,
        changes_image=changes_image,
        default_size=default_size,
    ),
)
