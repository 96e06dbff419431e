"""VAE_DECODE: latents to pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import nn

from kdit.errors import InputError, NonFiniteError
from kdit.keys import InferNodeType, ModelKey, TensorKey
from kdit.models.vae_latents import KLAutoencoder
from kdit.nodes.core.factory import InferNodeFactory
from kdit.nodes.core.metadata import read_metadata
from kdit.nodes.core.node import InferNode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.core.pin_hub import PinHub
from kdit.nodes.infer.pixels import cut_to


@dataclass(frozen=True)
class DecodeSettings:
    """The node's metadata."""

    output_size: tuple[int, int] | None = None  # (width, height) to cut from the middle; None: all that was decoded


@InferNodeFactory.register(InferNodeType.VAE_DECODE, [ModelKey.VAE_KL])
class VaeDecodeNode(InferNode):
    """LATENTS [B, C, h, w] to IMAGE [B, H, W, 3] in [0, 1], sample by sample."""

    input_defs: ClassVar[list[PinDef]] = [TensorKey.LATENTS]
    output_defs: ClassVar[list[PinDef]] = [TensorKey.IMAGE]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Decode; a non-finite picture is an error, never a black one."""
        vae = KLAutoencoder(cast(nn.Module, pins.get_model()))
        value = pins.get_tensor(TensorKey.LATENTS)
        if value is None or isinstance(value.data, list):
            raise InputError("VAE_DECODE needs one LATENTS tensor [B, C, h, w]; connect a GENERATE node or feed one")
        if value.data.ndim != 4 or value.data.shape[1] != vae.channels:
            raise InputError(f"LATENTS must be [B, {vae.channels}, h, w], got {tuple(value.data.shape)}")
        size = read_metadata(DecodeSettings, context).output_size
        pixels = torch.cat([cut_to(vae.decode(latents), size) for latents in value.data.split(1)])
        if not bool(torch.isfinite(pixels).all()):
            raise NonFiniteError(
                "decode: the autoencoder gave NaN or infinity; check its weights, or decode in float32"
            )
        pins.put_tensor(TensorKey.IMAGE, pixels)
