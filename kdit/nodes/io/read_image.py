"""READ_IMAGE: picture or mask files -> pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kdit.errors import InputError
from kdit.keys import IONodeType, TensorKey
from kdit.media.image_reader import read_image, read_mask
from kdit.nodes.core.factory import IONodeFactory
from kdit.nodes.core.metadata import read_metadata
from kdit.nodes.core.node import IONode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.core.pin_hub import PinHub


@dataclass(frozen=True)
class ReadImageSettings:
    """``img_paths``: the files, one per image. ``kind``: what they are."""

    img_paths: Sequence[str]
    kind: Literal["image", "mask"] = "image"

    def __post_init__(self) -> None:
        paths = self.img_paths
        if not isinstance(paths, list | tuple) or not paths or not all(isinstance(path, str) for path in paths):
            raise InputError(f"READ_IMAGE: img_paths must be a list of at least one path, got {paths!r}")
        if self.kind not in ("image", "mask"):
            raise InputError(f'READ_IMAGE: kind must be "image" or "mask", got {self.kind!r}')


@IONodeFactory.register(IONodeType.READ_IMAGE, [None])
class ReadImageNode(IONode):
    """IMAGE: [B, H, W, 3], of masks [B, H, W, 1], float32 in [0, 1]; a list of B = 1 if the files differ in size."""

    output_defs: ClassVar[list[PinDef]] = [TensorKey.IMAGE]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Raises InputError for a file that is missing or is not a picture."""
        settings = read_metadata(ReadImageSettings, context)
        read = read_mask if settings.kind == "mask" else read_image
        images = [read(path, notice=pins.notice) for path in settings.img_paths]
        same_size = len({image.shape for image in images}) == 1
        pins.put_tensor(TensorKey.IMAGE, torch.cat(images) if same_size else images)
