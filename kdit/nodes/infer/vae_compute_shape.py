"""VAE_COMPUTE_SHAPE: the main latent, empty unless an image was encoded; its shape says what the generator makes."""

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


@dataclass(frozen=True)
class ComputeShapeSettings:
    """The node's metadata."""

    num_samples: int  # B


@InferNodeFactory.register(InferNodeType.VAE_COMPUTE_SHAPE, [ModelKey.VAE_KL])
class VaeComputeShapeNode(InferNode):
    """Writes zeros [B, C, H/f, W/f] for the size in ``runtime_config``, or what is connected to BASE_LATENT."""

    input_defs: ClassVar[list[PinDef]] = [TensorKey.BASE_LATENT]
    output_defs: ClassVar[list[PinDef]] = [TensorKey.BASE_LATENT]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Compute the shape."""
        vae = KLAutoencoder(cast(nn.Module, pins.get_model()))
        num_samples = read_metadata(ComputeShapeSettings, context).num_samples
        assert context.runtime_config is not None and context.runtime_config.size is not None
        width, height = context.runtime_config.size
        if width % vae.factor or height % vae.factor:
            raise InputError(f"size {width}x{height} is not a multiple of the autoencoder's {vae.factor} pixels")
        shape = (num_samples, vae.channels, height // vae.factor, width // vae.factor)
        given = pins.get_tensor(TensorKey.BASE_LATENT)
        if given is None:
            pins.put_tensor(TensorKey.BASE_LATENT, torch.zeros(shape))
            return
        shapes = [tuple(tensor.shape) for tensor in given.tensors()]
        if shapes != [shape]:
            raise InputError(f"encoded images are latents {shapes}, expected one tensor {shape}")
        pins.put_tensor(TensorKey.BASE_LATENT, given.data)
