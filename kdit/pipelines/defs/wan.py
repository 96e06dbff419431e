"""Wan 2.1 and 2.2: graphs of text and image to video, with one network or two experts; where models lie, defaults."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from kdit.errors import CheckpointError
from kdit.keys import InferNodeType, IONodeType, ModelKey, PipelineKey
from kdit.models.checkpoint import INDEX_FILE, Checkpoint
from kdit.models.rows import LatentShape
from kdit.models.video_latents import VideoVaeParams, latent_frames
from kdit.models.wan.config import WanParams
from kdit.models.wan.single_file import BOUNDARY_I2V, BOUNDARY_T2V
from kdit.pipelines.context_builders.wan import BOUNDARY, WanContextBuilder, WanI2VContextBuilder, WanI2VExtraInputs
from kdit.pipelines.extra_inputs import ExtraInputs, MediaInputs
from kdit.pipelines.family_pipeline import Component, FamilyPipeline, no_default_size
from kdit.pipelines.generate_inputs import PipelineGenerateInputs
from kdit.pipelines.grid_latents import GridLatents
from kdit.pipelines.image_sizes import size_like
from kdit.pipelines.part_widths import check_width
from kdit.pipelines.pipeline_def import PipelineDef
from kdit.pipelines.pipeline_def_builder import PipelineDefBuilder
from kdit.pipelines.pipeline_defaults import PipelineDefaults

IMAGE_ENCODER = "image_encoder"
TEXT_LENGTH = 512
DECODED_AT_ONCE = 4  # frames that the autoencoder's last level holds
FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class WanForm:
    """In what the pipelines differ."""

    key: PipelineKey
    networks: tuple[ModelKey, ...]  # of two the second is the expert of the low-noise steps
    vae: ModelKey
    takes_images: bool
    reads_frames: bool = False  # as channels beside the noise; else a given first frame stands in the latents
    size: tuple[int, int] = (832, 480)
    frame_num: int = 81
    fps: int = 16
    cfg_scale: float = 5.0
    cfg_scale_2: float | None = None


class WanLatentForm(GridLatents):
    """Latents (C, F, H/f, W/f), on the pins and in public."""

    def shape(self, checkpoint: Checkpoint, size: tuple[int, int], frame_num: int | None) -> LatentShape:
        """(C, F, H/f, W/f) for ``frame_num`` frames of ``size`` (width, height)."""
        vae, (width, height) = vae_of(checkpoint), size
        assert frame_num is not None
        return vae.channels, latent_frames(frame_num, vae.temporal_factor), height // vae.factor, width // vae.factor


def vae_of(checkpoint: Checkpoint) -> VideoVaeParams:
    """The sizes of the checkpoint's autoencoder."""
    return VideoVaeParams.from_config(checkpoint.component("vae").config)


def params_of(checkpoint: Checkpoint, folder: str = "transformer") -> WanParams:
    """The sizes of the checkpoint's network."""
    return WanParams.from_config(checkpoint.component(folder).config)


def accepts(form: WanForm, checkpoint: Checkpoint) -> bool:
    """By what model_index.json states: a boundary between two experts, or times for each token."""
    options = checkpoint.options
    by_token = options.get("expand_timesteps", False) is True
    return by_token == (form.vae is ModelKey.VAE_WAN2_2) and (BOUNDARY in options) == (len(form.networks) == 2)


def defaults(form: WanForm, checkpoint: Checkpoint) -> PipelineDefaults:
    """The published settings. Raises CheckpointError for parts that do not belong together."""
    params, vae = params_of(checkpoint), vae_of(checkpoint)
    _check_parts(form, checkpoint, params, vae)
    multiples = [vae.factor * patch for patch in params.patch_size[1:]]
    return PipelineDefaults(
        size=form.size,
        size_multiple=max(multiples),
        max_side=params.max_grid * min(multiples),
        steps=50,
        guidance_scale=None,
        cfg_scale=form.cfg_scale,
        cfg_scale_2=form.cfg_scale_2,
        has_second_expert=len(form.networks) == 2,
        max_sequence_length=TEXT_LENGTH,
        # The reference finds the image's tokens behind a text of this length.
        min_sequence_length=1 if params.image_dim is None else TEXT_LENGTH,
        max_sequence_limit=TEXT_LENGTH,
        frame_num=form.frame_num,
        frame_step=vae.temporal_factor,
        fps=form.fps,
    )


def _check_parts(form: WanForm, checkpoint: Checkpoint, params: WanParams, vae: VideoVaeParams) -> None:
    beside = vae.temporal_factor + vae.channels if form.reads_frames else 0
    expected = (vae.channels + beside, vae.channels)
    if (params.in_channels, params.out_channels) != expected:
        raise CheckpointError(
            f"transformer/config.json: in_channels and out_channels are {params.in_channels} and "
            f"{params.out_channels}; {checkpoint.pipeline_class} with this autoencoder needs {expected[0]} and "
            f"{expected[1]}"
        )
    check_width(checkpoint, ("text_encoder",), "d_model", params.txt_dim, "text_dim")
    if len(form.networks) == 1 and "transformer_2" in checkpoint.components:
        raise CheckpointError(
            f"{INDEX_FILE} lists transformer_2 but no {BOUNDARY}, so that no step would run it; state the part of the "
            f"schedule at which it takes over (published: {BOUNDARY_T2V} for text, {BOUNDARY_I2V} for image to video), "
            "or make transformer_2 [null, null]"
        )
    if len(form.networks) == 2:
        ratio = checkpoint.options[BOUNDARY]
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            raise CheckpointError(f"{INDEX_FILE}: {BOUNDARY} is {ratio!r}, expected a number from 0 to 1")
        if params_of(checkpoint, "transformer_2") != params:
            raise CheckpointError("transformer_2/config.json differs from transformer/config.json in a size")
    if form.reads_frames and params.image_dim is not None:
        for name in (IMAGE_ENCODER, "image_processor"):
            checkpoint.component(name)


def memory_floor(form: WanForm, checkpoint: Checkpoint, inputs: PipelineGenerateInputs, rows: int) -> int:
    """Bytes of the larger of: keys and values of all texts with one block's stream and MLP, one decoded sample."""
    params, vae, config = params_of(checkpoint), vae_of(checkpoint), inputs.runtime_config
    assert config.size is not None and config.frame_num is not None
    itemsize: int = getattr(torch, inputs.execute_config.dtype).itemsize
    width, height = config.size
    frames = latent_frames(config.frame_num, vae.temporal_factor)
    patch_frames, patch_height, patch_width = params.patch_size
    tokens = (frames // patch_frames) * (height // vae.factor // patch_height) * (width // vae.factor // patch_width)
    texts = inputs.num_rows * (inputs.sample_config.max_sequence_length or 0) * 2 * params.dim * params.num_layers
    denoising = texts + rows * tokens * (2 * params.dim + params.ffn_dim)
    if config.output_type == "latents":
        return denoising * itemsize
    pixels = width * height * config.frame_num * 3 * FLOAT32_BYTES * inputs.num_samples
    features = 2 * width * height * min(config.frame_num, DECODED_AT_ONCE) * vae.features * itemsize
    return max(denoising * itemsize, pixels + features)


def default_size(extra: ExtraInputs, given: PipelineDefaults) -> tuple[int, int] | None:
    """As many pixels as the default size has, in the shape of the (first) start picture."""
    assert isinstance(extra, WanI2VExtraInputs)
    if not extra.start_img_path:
        return None
    first = extra.start_img_path if isinstance(extra.start_img_path, str) else extra.start_img_path[0]
    return size_like(first, given.size_multiple, area=given.size[0] * given.size[1], enlarge=True)


def from_media(form: WanForm, media: MediaInputs) -> ExtraInputs:
    """One start picture for all samples, or one for each; the picture that all end with."""
    media.refuse("Wan", "images", *(("last_image",) if form.reads_frames else ()))
    start = media.images[0] if len(media.images) == 1 else list(media.images) or None
    return WanI2VExtraInputs(start_img_path=start, end_img_path=media.last_image)


def components(form: WanForm) -> dict[ModelKey, Component]:
    """Where a folder keeps them."""
    found = {
        ModelKey.UMT5TextEncoder: Component("text_encoder", "tokenizer"),
        form.vae: Component("vae"),
        **dict(zip(form.networks, (Component("transformer"), Component("transformer_2")), strict=False)),
    }
    if form.reads_frames:
        found[ModelKey.CLIPImageEncoder] = Component(IMAGE_ENCODER, "image_processor", optional=True)
    return found


def build(form: WanForm, checkpoint: Checkpoint) -> PipelineDef:
    """Text, and frames that are given, into the loop; its latents into the autoencoder, out to caller and file."""
    b = PipelineDefBuilder(form.key)
    network, *second = form.networks
    text_encoder, vae = b.add_loader(ModelKey.UMT5TextEncoder), b.add_loader(form.vae)
    text = b.add_infer(InferNodeType.TEXT_ENCODE, ModelKey.UMT5TextEncoder)
    shape = b.add_infer(InferNodeType.VAE_COMPUTE_SHAPE, form.vae)
    generate = b.add_infer(InferNodeType.GENERATE, network, models=second)
    decode = b.add_infer(InferNodeType.VAE_DECODE, form.vae)
    save = b.add_io(IONodeType.SAVE_VIDEO)
    fetch_latents, fetch_video = b.add_io(IONodeType.FETCH_TENSOR), b.add_io(IONodeType.FETCH_TENSOR)
    for key in form.networks:
        b.connect((b.add_loader(key).pin(key), generate.pin(key)))
    b.connect(
        (text_encoder.UMT5TextEncoder, text.UMT5TextEncoder),
        (vae.pin(form.vae), shape.pin(form.vae)),
        (vae.pin(form.vae), decode.pin(form.vae)),
        (text.POSITIVE, generate.POSITIVE),
        (text.NEGATIVE, generate.NEGATIVE),
        (shape.BASE_LATENT, generate.BASE_LATENT),
        (generate.LATENTS, decode.LATENTS),
        (generate.LATENTS, fetch_latents.LATENTS),
        (decode.VIDEO, fetch_video.VIDEO),
        (decode.VIDEO, save.VIDEO),
    )
    if form.takes_images:
        encode = b.add_infer(InferNodeType.VAE_ENCODE_SPATIAL, form.vae)
        start, end = b.add_io(IONodeType.READ_IMAGE), b.add_io(IONodeType.READ_IMAGE)
        b.connect(
            (vae.pin(form.vae), encode.pin(form.vae)),
            (start.IMAGE, encode.START_IMG),
            (end.IMAGE, encode.END_IMG),
            (encode.BASE_LATENT, shape.BASE_LATENT),
        )
        if form.reads_frames and params_of(checkpoint).image_dim is not None:
            look = b.add_infer(InferNodeType.IMAGE_ENCODE, ModelKey.CLIPImageEncoder)
            b.connect(
                (b.add_loader(ModelKey.CLIPImageEncoder).CLIPImageEncoder, look.CLIPImageEncoder),
                (start.IMAGE, look.START_IMG),
                (end.IMAGE, look.END_IMG),
                (look.AUX_LATENT, generate.AUX_LATENT),
            )
    return b.build()


def pipeline(form: WanForm) -> FamilyPipeline:
    """What the form's pipeline declares."""
    return FamilyPipeline(
        key=form.key,
        network=form.networks[0],
        vae=form.vae,
        components=components(form),
        build=partial(build, form),
        defaults=partial(defaults, form),
        latents=WanLatentForm(),
        memory_floor=partial(memory_floor, form),
        context_builder=WanI2VContextBuilder if form.takes_images else WanContextBuilder,
        output="video",
        accepts=partial(accepts, form),
        extra_inputs=WanI2VExtraInputs if form.takes_images else None,
        from_media=partial(from_media, form) if form.takes_images else None,
        default_size=default_size if form.takes_images else no_default_size,
    )


FORMS = (
    WanForm(key=PipelineKey.WAN2_1_T2V, networks=(ModelKey.Wan2_1_T2V,), vae=ModelKey.VAE_WAN2_1, takes_images=False),
    WanForm(
        key=PipelineKey.WAN2_1_I2V,
        networks=(ModelKey.Wan2_1_I2V,),
        vae=ModelKey.VAE_WAN2_1,
        takes_images=True,
        reads_frames=True,
    ),
    WanForm(
        key=PipelineKey.WAN2_2_T2V_14B,
        networks=(ModelKey.Wan2_2_T2V_14B, ModelKey.Wan2_2_T2V_14B_LOW),
        vae=ModelKey.VAE_WAN2_1,
        takes_images=False,
        cfg_scale=4.0,
        cfg_scale_2=3.0,
    ),
    WanForm(
        key=PipelineKey.WAN2_2_I2V_14B,
        networks=(ModelKey.Wan2_2_I2V_14B, ModelKey.Wan2_2_I2V_14B_LOW),
        vae=ModelKey.VAE_WAN2_1,
        takes_images=True,
        reads_frames=True,
        cfg_scale=3.5,
    ),
    WanForm(
        key=PipelineKey.WAN2_2_TI2V_5B,
        networks=(ModelKey.Wan2_2_TI2V_5B,),
        vae=ModelKey.VAE_WAN2_2,
        takes_images=True,
        size=(1280, 704),
        frame_num=121,
        fps=24,
    ),
)
PIPELINES = tuple(pipeline(form) for form in FORMS)
