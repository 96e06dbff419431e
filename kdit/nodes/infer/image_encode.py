"""IMAGE_ENCODE: start and end pictures to tokens of an image encoder, which the loop attends to."""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor

from kdit.errors import InputError, NonFiniteError
from kdit.keys import InferNodeType, ModelKey, ModelKind, TensorKey
from kdit.media.image_fit import to_pillow
from kdit.models.image_encoder import ImageEncoder
from kdit.nodes.core.factory import InferNodeFactory
from kdit.nodes.core.metadata import read_metadata
from kdit.nodes.core.node import InferNode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.core.pin_hub import PinHub
from kdit.nodes.infer.pixels import check_one_per_sample, image_list
from kdit.nodes.infer.vae_compute_shape import ComputeShapeSettings


@InferNodeFactory.register(InferNodeType.IMAGE_ENCODE, ModelKey.of_kind(ModelKind.IMAGE_ENCODER))
class ImageEncodeNode(InferNode):
    """The hidden states before the last layer, [B, tokens, D]: those of the start picture, then of the end picture."""

    input_defs: ClassVar[list[PinDef]] = [TensorKey.START_IMG, TensorKey.END_IMG]
    output_defs: ClassVar[list[PinDef]] = [TensorKey.AUX_LATENT]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Encode each picture once, whole and in its own shape: the encoder's processor resizes and cuts it."""
        encoder = cast(ImageEncoder, pins.get_model())
        num_samples = read_metadata(ComputeShapeSettings, context).num_samples
        tokens = []
        for key in (TensorKey.START_IMG, TensorKey.END_IMG):
            value = pins.get_tensor(key)
            if value is not None:
                tokens.append(_encode(encoder, image_list(value.data), num_samples, key))
        if not tokens:
            raise InputError("IMAGE_ENCODE has no START_IMG; connect a READ_IMAGE node or feed one")
        pins.put_tensor(TensorKey.AUX_LATENT, torch.cat(tokens, dim=1))


def _encode(encoder: ImageEncoder, pictures: list[Tensor], num_samples: int, key: TensorKey) -> Tensor:
    check_one_per_sample(pictures, num_samples, f"pictures of {key.name}")
    tokens = torch.cat([encoder.encode(to_pillow(picture)) for picture in pictures])
    if not bool(torch.isfinite(tokens).all()):
        raise NonFiniteError("image encode: the encoder gave NaN or infinity; check its weights, or use another dtype")
    return tokens.expand(num_samples, *tokens.shape[1:])
