"""VAE_ENCODE_SPATIAL: one picture per sample to main latents of the requested size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

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
from kdit.nodes.infer.encode_samples import encode_samples, sample_noise
from kdit.nodes.infer.pixels import check_one_per_sample, image_list, to_vae_pixels


@dataclass(frozen=True)
class EncodeSpatialSettings:
    """The node's metadata."""

    seeds: tuple[int, ...]  # one per sample
    sampled: bool = True  # sample the posterior; else take its mode
    earlier_draws: tuple[str, ...] = ()  # dtypes of what each sample's generator has drawn before


@InferNodeFactory.register(InferNodeType.VAE_ENCODE_SPATIAL, [ModelKey.VAE_KL])
class VaeEncodeSpatialNode(InferNode):
    """One image serves all samples. The size comes from ``runtime_config``."""

    input_defs: ClassVar[list[PinDef]] = [TensorKey.IMAGE, TensorKey.POSTERIOR_NOISE]
    output_defs: ClassVar[list[PinDef]] = [TensorKey.BASE_LATENT]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Resize to the requested size and encode each sample with its own generator."""
        vae = KLAutoencoder(cast(nn.Module, pins.get_model()))
        value = pins.get_tensor(TensorKey.IMAGE)
        if value is None:
            raise InputError("VAE_ENCODE_SPATIAL has no IMAGE; connect a READ_IMAGE node or feed one")
        images = image_list(value.data)
        settings = read_metadata(EncodeSpatialSettings, context)
        config, num_samples = context.runtime_config, len(settings.seeds)
        assert config is not None and config.size is not None
        check_one_per_sample(images, num_samples)
        noise = None
        if settings.sampled:
            noise = sample_noise(pins, vae, config.size, settings.seeds, settings.earlier_draws)
        pixels = [to_vae_pixels(image, config.size, config.fit) for image in images]
        pins.put_tensor(TensorKey.BASE_LATENT, encode_samples(vae, pixels, noise, num_samples))
