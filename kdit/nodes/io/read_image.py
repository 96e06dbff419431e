"""READ_IMAGE: image files -> pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kdit.errors import InputError
from kdit.keys import IONodeType, TensorKey
from kdit.nodes.core.factory import IONodeFactory
from kdit.nodes.core.metadata import read_metadata
from kdit.nodes.core.node import IONode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.core.pin_hub import PinHub

if TYPE_CHECKING:
    from PIL.Image import Image

_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")


@dataclass(frozen=True)
class ReadImageSettings:
    """``img_paths``: the files, one per image."""

    img_paths: Sequence[str]

    def __post_init__(self) -> None:
        paths = self.img_paths
        if not isinstance(paths, list | tuple) or not paths or not all(isinstance(path, str) for path in paths):
            raise InputError(f"READ_IMAGE: img_paths must be a list of at least one path, got {paths!r}")


@IONodeFactory.register(IONodeType.READ_IMAGE, [None])
class ReadImageNode(IONode):
    """IMAGE: [B, H, W, 3], float32 in [0, 1]; a list of [1, H, W, 3] if the files differ in size."""

    output_defs: ClassVar[list[PinDef]] = [TensorKey.IMAGE]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Raises InputError for a file that is missing or is not an image."""
        images = [read_image(path) for path in read_metadata(ReadImageSettings, context).img_paths]
        same_size = len({image.shape for image in images}) == 1
        pins.put_tensor(TensorKey.IMAGE, torch.cat(images) if same_size else images)


def read_image(path: str) -> Tensor:
    """Pixels of one file as RGB, [1, H, W, 3], float32 in [0, 1].

    Turned as its EXIF orientation says; transparent pixels are laid over white; grey becomes three equal
    channels, 16-bit grey keeps its precision. Of an animation the first frame is taken. Raises InputError.
    """
    from PIL import Image, ImageOps  # Pillow is not needed until a file is read

    try:
        with Image.open(path) as opened:
            return _pixels(ImageOps.exif_transpose(opened))
    except FileNotFoundError:
        raise InputError(f"image {path!r} does not exist") from None
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise InputError(f"image {path!r} cannot be read: {error}") from error


def _pixels(image: Image) -> Tensor:
    if image.mode.startswith("I"):  # 16 bits per pixel, which convert("RGB") would clip to 255
        grey = _channels(image.convert("I"), torch.int32, 1) / 65535
        return grey.clamp(0, 1).expand(-1, -1, -1, 3).contiguous()
    if image.mode == "F":
        raise ValueError("float pixels have no defined range; save it with 8 or 16 bits per channel")
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        rgba = _channels(image.convert("RGBA"), torch.uint8, 4) / 255
        rgb, alpha = rgba[..., :3], rgba[..., 3:]
        return rgb * alpha + (1 - alpha)
    return _channels(image.convert("RGB"), torch.uint8, 3) / 255


def _channels(image: Image, dtype: torch.dtype, num_channels: int) -> Tensor:
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=dtype)
    return pixels.view(1, image.height, image.width, num_channels).to(torch.float32)
