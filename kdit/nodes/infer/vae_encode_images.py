"""VAE_ENCODE_IMAGES: reference pictures of any sizes to auxiliary latents, one tensor per picture."""

from __future__ import annotations

from typing import ClassVar, cast

from torch import nn

from kdit.errors import InputError
from kdit.keys import InferNodeType, ModelKey, TensorKey
from kdit.models.vae_latents import KLAutoencoder
from kdit.nodes.core.factory import InferNodeFactory
from kdit.nodes.core.node import InferNode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.core.pin_hub import PinHub
from kdit.nodes.infer.pixels import image_list, to_vae_pixels


@InferNodeFactory.register(InferNodeType.VAE_ENCODE_IMAGES, [ModelKey.VAE_KL])
class VaeEncodeImagesNode(InferNode):
    """Each picture keeps its own size, rounded down to the autoencoder's grid; the posterior's mode is taken."""

    input_defs: ClassVar[list[PinDef]] = [TensorKey.IMAGE]
    output_defs: ClassVar[list[PinDef]] = [TensorKey.AUX_LATENT]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Encode one by one."""
        vae = KLAutoencoder(cast(nn.Module, pins.get_model()))
        value = pins.get_tensor(TensorKey.IMAGE)
        if value is None:
            raise InputError("VAE_ENCODE_IMAGES has no IMAGE; connect a READ_IMAGE node or feed one")
        latents = [vae.encode(to_vae_pixels(image, None, vae.factor), None) for image in image_list(value.data)]
        pins.put_tensor(TensorKey.AUX_LATENT, latents)
