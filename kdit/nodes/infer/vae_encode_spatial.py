"""VAE_ENCODE_SPATIAL: one picture per sample to main latents of the requested size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import nn

from kdit.errors import InputError
from kdit.keys import InferNodeType, ModelKey, TensorKey
from kdit.models.vae_latents import KLAutoencoder
from kdit.nodes.core.factory import InferNodeFactory
from kdit.nodes.core.metadata import read_metadata
from kdit.nodes.core.node import InferNode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.core.pin_hub import PinHub
from kdit.nodes.infer.pixels import image_list, to_vae_pixels


@dataclass(frozen=True)
class EncodeSpatialSettings:
    """The node's metadata."""

    seeds: tuple[int, ...] | None  # one per sample, to sample the posterior; None takes its mode


@InferNodeFactory.register(InferNodeType.VAE_ENCODE_SPATIAL, [ModelKey.VAE_KL])
class VaeEncodeSpatialNode(InferNode):
    """One image serves all samples. The size comes from ``runtime_config``."""

    input_defs: ClassVar[list[PinDef]] = [TensorKey.IMAGE]
    output_defs: ClassVar[list[PinDef]] = [TensorKey.BASE_LATENT]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Resize to the requested size and encode each sample with its own generator."""
        vae = KLAutoencoder(cast(nn.Module, pins.get_model()))
        value = pins.get_tensor(TensorKey.IMAGE)
        if value is None:
            raise InputError("VAE_ENCODE_SPATIAL has no IMAGE; connect a READ_IMAGE node or feed one")
        images = image_list(value.data)
        seeds = read_metadata(EncodeSpatialSettings, context).seeds
        assert context.runtime_config is not None
        size = context.runtime_config.size
        if seeds is not None and len(images) == 1:
            images = images * len(seeds)
        if seeds is not None and len(seeds) != len(images):
            raise InputError(f"{len(images)} images for {len(seeds)} samples; give one image, or one per sample")
        generators = [None] * len(images) if seeds is None else [torch.Generator().manual_seed(s) for s in seeds]
        latents = [
            vae.encode(to_vae_pixels(image, size, vae.factor), generator)
            for image, generator in zip(images, generators, strict=True)
        ]
        pins.put_tensor(TensorKey.BASE_LATENT, torch.cat(latents))
