"""VAE_COMPUTE_SHAPE, VAE_ENCODE_SPATIAL and VAE_DECODE for autoencoders of videos."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from kdit.config import RuntimeConfig
from kdit.errors import InputError, NonFiniteError
from kdit.keys import InferNodeType, ModelKey, TensorKey
from kdit.models.rows import LatentShape
from kdit.models.video_latents import VideoAutoencoder, first_frame_mask, latent_frames
from kdit.nodes.core.factory import InferNodeFactory
from kdit.nodes.core.metadata import read_metadata
from kdit.nodes.core.node import InferNode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.core.pin_hub import PinHub
from kdit.nodes.infer.pixels import check_one_per_sample, cut_to, image_list, to_vae_pixels
from kdit.nodes.infer.vae_compute_shape import ComputeShapeSettings

VIDEO_VAES = (ModelKey.VAE_WAN2_1, ModelKey.VAE_WAN2_2)


@dataclass(frozen=True)
class EncodeFramesSettings:
    """The encoding node's metadata."""

    num_samples: int  # B
    first_frame_alone: bool = False  # encode the first frame as a video of its own; else all, the others black


@dataclass(frozen=True)
class DecodeVideoSettings:
    """The decoding node's metadata."""

    output_size: tuple[int, int] | None = None  # (width, height) to cut from the middle; None: all that was decoded
    output_frames: int | None = None  # to keep from the start; None: all


def video_latent_shape(vae: VideoAutoencoder, config: RuntimeConfig | None) -> LatentShape:
    """(C, F, H/f, W/f) for the size and number of frames in ``config``. Raises InputError if they do not fit."""
    assert config is not None and config.size is not None and config.frame_num is not None
    (width, height), frames, factor = config.size, config.frame_num, vae.factor
    if width % factor or height % factor or (frames - 1) % vae.temporal_factor:
        raise InputError(
            f"{frames} frames of {width}x{height}: this autoencoder takes multiples of {factor} pixels and "
            f"{vae.temporal_factor} n + 1 frames"
        )
    return vae.channels, latent_frames(frames, vae.temporal_factor), height // factor, width // factor


@InferNodeFactory.register(InferNodeType.VAE_COMPUTE_SHAPE, VIDEO_VAES)
class VideoShapeNode(InferNode):
    """Writes zeros [B, C, F, H/f, W/f] for the size in ``runtime_config``, or what is connected to BASE_LATENT."""

    input_defs: ClassVar[list[PinDef]] = [TensorKey.BASE_LATENT]
    output_defs: ClassVar[list[PinDef]] = [TensorKey.BASE_LATENT]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Compute the shape."""
        vae = VideoAutoencoder(cast(nn.Module, pins.get_model()))
        shape = (
            read_metadata(ComputeShapeSettings, context).num_samples,
            *video_latent_shape(vae, context.runtime_config),
        )
        given = pins.get_tensor(TensorKey.BASE_LATENT)
        if given is None:
            pins.put_tensor(TensorKey.BASE_LATENT, torch.zeros(shape))
            return
        if tuple(given.tensors()[0].shape) != shape:
            raise InputError(f"encoded frames are latents {tuple(given.tensors()[0].shape)}, expected {shape}")
        pins.put_tensor(TensorKey.BASE_LATENT, given.data)


@InferNodeFactory.register(InferNodeType.VAE_ENCODE_SPATIAL, VIDEO_VAES)
class VideoEncodeNode(InferNode):
    """START_IMG, and END_IMG where there is one, to BASE_LATENT: latents [B, C, F, h, w] and a mask of what is given.

    As first and last frame of a video that is black between: the mask [B, t, F, h, w] has the t frames of each latent
    frame as channels. As a first frame alone: latents of zeros follow it, and the mask [B, 1, F, h, w] marks it.
    """

    input_defs: ClassVar[list[PinDef]] = [TensorKey.START_IMG, TensorKey.END_IMG]
    output_defs: ClassVar[list[PinDef]] = [TensorKey.BASE_LATENT]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Bring the pictures to the size in ``runtime_config`` and encode each distinct pair once."""
        vae = VideoAutoencoder(cast(nn.Module, pins.get_model()))
        settings, config = read_metadata(EncodeFramesSettings, context), context.runtime_config
        shape = video_latent_shape(vae, config)
        assert config is not None and config.frame_num is not None
        start = _frames(pins, TensorKey.START_IMG, config, settings.num_samples)
        end = _frames(pins, TensorKey.END_IMG, config, settings.num_samples)
        if not start:
            raise InputError("VAE_ENCODE_SPATIAL has no START_IMG; connect a READ_IMAGE node or feed one")
        if settings.first_frame_alone:
            if end:
                raise InputError("VAE_ENCODE_SPATIAL: an END_IMG has no place beside a first frame alone")
            latents = _encoded([frame[:, :, None] for frame in start], vae, settings.num_samples)
            padded = latents.new_zeros((settings.num_samples, *shape))
            padded[:, :, :1] = latents
            pins.put_tensor(TensorKey.BASE_LATENT, [padded, first_frame_mask(padded, 1)])
            return
        videos = _black_between(start, end, config.frame_num)
        latents = _encoded(videos, vae, settings.num_samples)
        mask = first_frame_mask(latents, vae.temporal_factor)
        if end:
            mask[:, -1, -1] = 1  # of the last latent frame's frames the last one
        pins.put_tensor(TensorKey.BASE_LATENT, [latents, mask])


def _frames(pins: PinHub, key: TensorKey, config: RuntimeConfig, num_samples: int) -> list[Tensor]:
    """The pictures on a pin as the autoencoder reads them, each [1, 3, H, W]; none if nothing is connected."""
    value = pins.get_tensor(key)
    if value is None:
        return []
    pictures = image_list(value.data)
    check_one_per_sample(pictures, num_samples, f"pictures of {key.name}")
    assert config.size is not None
    return [to_vae_pixels(picture, config.size, config.fit) for picture in pictures]


def _black_between(start: list[Tensor], end: list[Tensor], num_frames: int) -> list[Tensor]:
    """Videos [1, 3, F, H, W], zero where no frame is given; one for all samples, or one for each."""
    if end and num_frames < 2:
        raise InputError(f"a start and an end picture need two frames at least, got frame_num {num_frames}")
    if end and len(start) != len(end):  # one of them serves all samples
        start, end = (pictures * (max(len(start), len(end)) // len(pictures)) for pictures in (start, end))
    videos = []
    for i, first in enumerate(start):
        video = first.new_zeros((1, first.shape[1], num_frames, *first.shape[2:]))
        video[:, :, 0] = first
        if end:
            video[:, :, -1] = end[i]
        videos.append(video)
    return videos


def _encoded(videos: list[Tensor], vae: VideoAutoencoder, num_samples: int) -> Tensor:
    """[1, 3, F, H, W] each -> latents [B, C, f, h, w]."""
    latents = torch.cat([vae.encode(video) for video in videos])
    if not bool(torch.isfinite(latents).all()):
        raise NonFiniteError("encode: the autoencoder gave NaN or infinity; check its weights, or encode in float32")
    return latents.expand(num_samples, *latents.shape[1:])


@InferNodeFactory.register(InferNodeType.VAE_DECODE, VIDEO_VAES)
class VideoDecodeNode(InferNode):
    """LATENTS [B, C, f, h, w] to VIDEO [B, F, H, W, 3] in [0, 1], sample by sample."""

    input_defs: ClassVar[list[PinDef]] = [TensorKey.LATENTS]
    output_defs: ClassVar[list[PinDef]] = [TensorKey.VIDEO]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Decode and cut; a frame that is not finite is an error, never a black one."""
        vae = VideoAutoencoder(cast(nn.Module, pins.get_model()))
        settings, value = read_metadata(DecodeVideoSettings, context), pins.get_tensor(TensorKey.LATENTS)
        if value is None or isinstance(value.data, list):
            raise InputError("VAE_DECODE needs one LATENTS tensor [B, C, f, h, w]; connect a GENERATE node or feed one")
        latents = value.data
        if latents.ndim != 5 or latents.shape[1] != vae.channels:
            raise InputError(f"LATENTS must be [B, {vae.channels}, f, h, w], got {tuple(latents.shape)}")
        kept = slice(settings.output_frames)
        videos = [cut_to(vae.decode(sample)[:, kept], settings.output_size) for sample in latents.split(1)]
        video = torch.cat(videos)
        if not bool(torch.isfinite(video).all()):
            raise NonFiniteError(
                "decode: the autoencoder gave NaN or infinity; check its weights, or decode in float32"
            )
        pins.put_tensor(TensorKey.VIDEO, video)
