"""SAVE_IMAGE: pixels -> PNG, JPEG or WebP files with the settings inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kdit.config.file_options import FileOptions
from kdit.errors import InputError
from kdit.keys import IONodeType, TensorKey
from kdit.media.formats import NO_OPTIONS, check_output
from kdit.media.image_writer import write_image
from kdit.media.levels import to_uint8
from kdit.nodes.core.factory import IONodeFactory
from kdit.nodes.core.metadata import read_metadata
from kdit.nodes.core.node import IONode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.core.pin_hub import PinHub


@dataclass(frozen=True)
class SaveImageSettings:
    """``paths``: one file per image, whose suffix chooses the format; ``text``: the texts of each file, or nothing;
    ``options``: how they are encoded.
    """

    paths: Sequence[str]
    text: Sequence[Mapping[str, str]] = ()
    options: FileOptions = NO_OPTIONS

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
        for image, path in zip(images, settings.paths, strict=True):
            check_output(path, "image", size=(image.shape[1], image.shape[0]), options=settings.options)
        texts = settings.text or [{}] * len(images)
        for image, path, text in zip(images, settings.paths, texts, strict=True):
            write_image(image, path, text, options=settings.options)
