"""VAE_ENCODE_IMAGES: pictures that condition the loop, to auxiliary latents: references, or images of the samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from kdit.config import RuntimeConfig
from kdit.errors import InputError
from kdit.keys import InferNodeType, ModelKey, TensorKey
from kdit.models.vae_latents import KLAutoencoder
from kdit.nodes.core.factory import InferNodeFactory
from kdit.nodes.core.metadata import read_metadata
from kdit.nodes.core.node import InferNode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.core.pin_hub import PinHub
from kdit.nodes.infer.encode_samples import encode_samples, sample_noise
from kdit.nodes.infer.pixels import check_one_per_sample, image_list, to_mask_pixels, to_vae_pixels

Size = tuple[int, int]


@dataclass(frozen=True)
class EncodeImagesSettings:
    """The node's metadata. The last three are of references, the others of images of the samples."""

    seeds: tuple[int, ...] | None = None  # one per sample; None: the pictures are references
    earlier_draws: tuple[str, ...] = ()  # dtypes of what each sample's generator has drawn before
    binarize_mask: bool = True  # the mask counts as black below one half, else as white
    preferred_sizes: tuple[Size, ...] = ()  # (width, height); the nearest in shape, instead of a picture's own size
    multiple: int | None = None  # own sizes are cut to it, in pixels; None: the autoencoder's grid


@InferNodeFactory.register(InferNodeType.VAE_ENCODE_IMAGES, [ModelKey.VAE_KL])
class VaeEncodeImagesNode(InferNode):
    """References: one tensor [1, C, h, w] per picture, each of its own size, the mode of the posterior.

    Images of the samples: brought to the requested size, one tensor [B, C, h, w], the posterior sampled. With a MASK
    (white hides) the hidden part of each image is grey, and a second tensor [B, f*f, h, w] holds the mask of the
    f x f pixels of each latent.
    """

    input_defs: ClassVar[list[PinDef]] = [TensorKey.IMAGE, TensorKey.MASK, TensorKey.POSTERIOR_NOISE]
    output_defs: ClassVar[list[PinDef]] = [TensorKey.AUX_LATENT]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Encode each distinct picture once."""
        vae = KLAutoencoder(cast(nn.Module, pins.get_model()))
        value = pins.get_tensor(TensorKey.IMAGE)
        if value is None:
            raise InputError("VAE_ENCODE_IMAGES has no IMAGE; connect a READ_IMAGE node or feed one")
        images, settings = image_list(value.data), read_metadata(EncodeImagesSettings, context)
        config = context.runtime_config
        assert config is not None
        if settings.seeds is None:
            latents = [_encode_reference(vae, image, settings, config) for image in images]
        else:
            latents = _encode_of_samples(vae, images, settings, settings.seeds, config, pins)
        pins.put_tensor(TensorKey.AUX_LATENT, latents)


def reference_size(own: Size, preferred: tuple[Size, ...], multiple: int) -> Size:
    """(width, height) at which a reference is encoded: its own, cut to ``multiple``, or that of ``preferred`` which is
    nearest in shape. Raises InputError for a picture smaller than ``multiple``.
    """
    width, height = (n // multiple * multiple for n in own)
    if not width or not height:
        raise InputError(f"a reference picture must have at least {multiple} pixels a side, got {own[0]}x{own[1]}")
    if not preferred:
        return width, height
    nearest = min(preferred, key=lambda size: (abs(width / height - size[0] / size[1]), size))
    return nearest[0] // multiple * multiple, nearest[1] // multiple * multiple


def _encode_reference(
    vae: KLAutoencoder, image: Tensor, settings: EncodeImagesSettings, config: RuntimeConfig
) -> Tensor:
    own = (image.shape[1], image.shape[0])
    size = reference_size(own, settings.preferred_sizes, settings.multiple or vae.factor)
    return vae.encode(to_vae_pixels(image, size, config.fit), None)


def _encode_of_samples(
    vae: KLAutoencoder,
    images: list[Tensor],
    settings: EncodeImagesSettings,
    seeds: tuple[int, ...],
    config: RuntimeConfig,
    pins: PinHub,
) -> list[Tensor]:
    assert config.size is not None
    num_samples = len(seeds)
    check_one_per_sample(images, num_samples)
    pixels = [to_vae_pixels(image, config.size, config.fit) for image in images]
    noise = sample_noise(pins, vae, config.size, seeds, settings.earlier_draws)
    value = pins.get_tensor(TensorKey.MASK)
    if value is None:
        return [encode_samples(vae, pixels, noise, num_samples)]
    given = image_list(value.data, channels=1)
    check_one_per_sample(given, num_samples, "masks")
    masks = [to_mask_pixels(mask, config.size, config.fit, binarize=settings.binarize_mask) for mask in given]
    if len(pixels) != len(masks):  # one of them serves all samples
        pixels, masks = (items * (num_samples // len(items)) for items in (pixels, masks))
    visible = [image * (1 - mask) for image, mask in zip(pixels, masks, strict=True)]
    folded = torch.cat([_fold(mask, vae.factor) for mask in masks])
    return [encode_samples(vae, visible, noise, num_samples), folded.expand(num_samples, *folded.shape[1:])]


def _fold(mask: Tensor, factor: int) -> Tensor:
    """[1, 1, H, W] -> [1, f*f, H/f, W/f]: the mask of each latent's pixels as channels, row by row."""
    return torch.nn.functional.pixel_unshuffle(mask, factor)
