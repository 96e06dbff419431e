"""SAVE_IMAGE: pixels -> PNG files with the settings as text chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kdit.errors import InputError, NonFiniteError
from kdit.keys import IONodeType, TensorKey
from kdit.nodes.core.factory import IONodeFactory
from kdit.nodes.core.metadata import read_metadata
from kdit.nodes.core.node import IONode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.core.pin_hub import PinHub
from kdit.output_file import check_writable, whole_file


@dataclass(frozen=True)
class SaveImageSettings:
    """``paths``: one .png file per image; ``text``: the text chunks of each file, or nothing."""

    paths: Sequence[str]
    text: Sequence[Mapping[str, str]] = ()

    def __post_init__(self) -> None:
        if self.text and len(self.text) != len(self.paths):
            raise InputError(f"SAVE_IMAGE: {len(self.paths)} paths but text for {len(self.text)} images")
        if len(set(self.paths)) != len(self.paths):
            raise InputError(f"SAVE_IMAGE: each image needs a path of its own, got {', '.join(self.paths)}")


@IONodeFactory.register(IONodeType.SAVE_IMAGE, [None])
class SaveImageNode(IONode):
    """Writes IMAGE, [B, H, W, 3] in [0, 1] or a list of such, one file per image."""

    input_defs: ClassVar[list[PinDef]] = [TensorKey.IMAGE]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Raises InputError, NonFiniteError or OutputError; nothing is written unless all images are sound."""
        settings = read_metadata(SaveImageSettings, context)
        value = pins.get_tensor(TensorKey.IMAGE)
        if value is None:
            raise InputError("SAVE_IMAGE: nothing is connected to IMAGE")
        images = [to_uint8(image) for batch in value.tensors() for image in batch]
        if len(images) != len(settings.paths):
            raise InputError(f"SAVE_IMAGE: {len(images)} images but {len(settings.paths)} paths")
        for path in settings.paths:
            check_writable(path)
        texts = settings.text or [{}] * len(images)
        for image, path, text in zip(images, settings.paths, texts, strict=True):
            write_png(image, path, text)


def to_uint8(image: Tensor) -> Tensor:
    """Pixels in [0, 1] -> 0 to 255 on the CPU, rounded to the nearest; raises NonFiniteError for NaN and infinity."""
    pixels = image.to(torch.float32)
    num_bad = int((~torch.isfinite(pixels)).sum())
    if num_bad:
        raise NonFiniteError(f"decoded image: {num_bad} of {pixels.numel()} values are NaN or infinite")
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).cpu()


def write_png(image: Tensor, path: str, text: Mapping[str, str]) -> None:
    """Write uint8 pixels [H, W, 3] and their text chunks (UTF-8); raises OutputError.

    The file appears under its name only when it is complete.
    """
    from PIL import Image, PngImagePlugin  # Pillow is not needed until a file is written

    chunks = PngImagePlugin.PngInfo()
    for key, value in text.items():
        chunks.add_itxt(key, value)
    with whole_file(path) as file:
        Image.fromarray(image.contiguous().numpy()).save(file, format="PNG", pnginfo=chunks)
