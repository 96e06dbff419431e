"""COMPOSITE: puts what a picture must keep of its original back in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from kdit.errors import InputError
from kdit.keys import InferNodeType, TensorKey
from kdit.media.image_fit import fit_image
from kdit.nodes.core.factory import InferNodeFactory
from kdit.nodes.core.metadata import read_metadata
from kdit.nodes.core.node import InferNode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.core.pin_hub import PinHub
from kdit.nodes.infer.pixels import check_one_per_sample, cut_to, image_list

Keep = Literal["none", "mask", "all"]


@dataclass(frozen=True)
class CompositeSettings:
    """The node's metadata."""

    keep: Keep = "none"  # of the original: nothing, what the mask leaves black, or everything
    output_size: tuple[int, int] | None = None  # (width, height) that was cut from the middle; None: nothing was

    def __post_init__(self) -> None:
        if self.keep not in get_args(Keep):
            raise InputError(f"COMPOSITE: keep must be one of {', '.join(get_args(Keep))}, got {self.keep!r}")


@InferNodeFactory.register(InferNodeType.COMPOSITE, [None])
class CompositeNode(InferNode):
    """IMAGE as it was made [B, H, W, 3], with parts of START_IMG as the autoencoder saw it.

    Where MASK is black the original stays to the bit, where it is white nothing of it, between they are blended.
    """

    input_defs: ClassVar[list[PinDef]] = [TensorKey.IMAGE, TensorKey.START_IMG, TensorKey.MASK]
    output_defs: ClassVar[list[PinDef]] = [TensorKey.IMAGE]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Originals and masks are brought to the size of ``runtime_config`` under its ``fit``, then cut."""
        settings = read_metadata(CompositeSettings, context)
        made = pins.get_tensor(TensorKey.IMAGE)
        if made is None or isinstance(made.data, list):
            raise InputError("COMPOSITE needs one IMAGE tensor [B, H, W, 3]; connect the node that makes it")
        if settings.keep == "none":
            pins.put_tensor(TensorKey.IMAGE, made.data)
            return
        config, num_samples = context.runtime_config, made.data.shape[0]
        assert config is not None and config.size is not None
        size, fit = config.size, config.fit

        def fitted(key: TensorKey, channels: int) -> Tensor:
            """One picture per sample, [B, H, W, channels]."""
            value = pins.get_tensor(key)
            if value is None:
                raise InputError(f"COMPOSITE has no {key.name}; connect the node that reads it")
            pictures = image_list(value.data, channels)
            check_one_per_sample(pictures, num_samples, key.name)
            batch = torch.stack([cut_to(fit_image(own, size, fit), settings.output_size) for own in pictures])
            return batch.expand(num_samples, *batch.shape[1:])

        original = fitted(TensorKey.START_IMG, 3).to(made.data)
        if original.shape != made.data.shape:
            raise InputError(f"COMPOSITE: the original is {tuple(original.shape)}, IMAGE {tuple(made.data.shape)}")
        if settings.keep == "mask":
            mask = fitted(TensorKey.MASK, 1).to(made.data)
            original = original * (1 - mask) + made.data * mask
        pins.put_tensor(TensorKey.IMAGE, original)
