"""Picture and mask files to pixels. Called by the READ_IMAGE node and by pipelines that need a picture's size."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kdit.errors import InputError
from kdit.media.damage import DAMAGE

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP", "PPM", "JPEG2000")  # none of them runs another program
MAX_PIXELS = 178_956_970  # above it Pillow itself speaks of a decompression bomb
WHITE, BLACK = (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)
MAX_16_BIT = 65535

_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")


def read_image(
    path: str, *, background: tuple[float, float, float] = WHITE, notice: Callable[[str], None] | None = None
) -> Tensor:
    """Pixels of one file as RGB, [1, H, W, 3], float32 in [0, 1].

    Turned as its EXIF orientation says. Transparent pixels are laid over ``background`` (red, green, blue in
    [0, 1]). Grey becomes three equal channels and keeps 16 bits; colours of 16 bits are read with 8. CMYK is
    converted without a profile, as (1 - ink) (1 - black); colour profiles are not applied at all. Of an animation
    the first frame is taken, which ``notice`` is told. Raises InputError.
    """
    with _opened(path) as image:
        _tell_first_frame(image, path, notice)
        rgb, alpha = _rgb_and_alpha(_upright(image))
    return rgb if alpha is None else rgb * alpha + torch.tensor(background) * (1 - alpha)


def read_mask(path: str, *, notice: Callable[[str], None] | None = None) -> Tensor:
    """How far each pixel is repainted, [1, H, W, 1], float32 in [0, 1]: the file's luminance, white is all.

    Grey stays grey. Transparent pixels count as black: what was not painted on is kept. Raises InputError.
    """
    with _opened(path) as image:
        _tell_first_frame(image, path, notice)
        image = _upright(image)
        if image.mode.startswith("I"):
            rgb, alpha = _rgb_and_alpha(image)
            grey = rgb[..., :1]
        else:
            alpha = _channels(image.convert("RGBA"), torch.uint8, 4)[..., 3:] / 255 if _has_alpha(image) else None
            opaque = image.convert("RGBA").convert("RGB") if _has_alpha(image) else _plain_rgb(image)
            grey = _channels(opaque.convert("L"), torch.uint8, 1) / 255
    return grey if alpha is None else grey * alpha


def image_size(path: str) -> tuple[int, int]:
    """(width, height) of the upright picture, without its pixels where the format allows. Raises InputError."""
    with _opened(path) as image:
        if image.format == "TIFF":  # which Pillow turns by itself when its pixels are read
            image.load()
        width, height = image.size
        sideways = _orientation(image) >= 5
    return (height, width) if sideways else (width, height)


@contextmanager
def _opened(path: str) -> Iterator[Image]:
    from PIL import Image, UnidentifiedImageError  # Pillow is not needed until a file is read

    if not Path(path).exists():
        raise InputError(f"image {path!r} does not exist")
    if not Path(path).is_file():  # reading a pipe or a device might never end
        raise InputError(f"image {path!r} cannot be read: it is not a file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # told below, at one limit
            opened = Image.open(path, formats=FORMATS)
        with opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise Image.DecompressionBombError
            yield opened
    except UnidentifiedImageError:
        raise InputError(f"image {path!r} cannot be read: it holds none of {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise InputError(f"image {path!r} cannot be read: it has more than {MAX_PIXELS} pixels") from None
    except DAMAGE as error:
        raise InputError(f"image {path!r} cannot be read: {str(error) or type(error).__name__}") from error


def _tell_first_frame(image: Image, path: str, notice: Callable[[str], None] | None) -> None:
    # The second picture of an MPO file, as phones write them, is a preview and no frame.
    if notice is not None and image.format != "MPO" and getattr(image, "is_animated", False):
        notice(f"image {path!r} holds several frames or pages; the first one is taken")


def _orientation(image: Image) -> int:
    """The EXIF orientation, 1 to 8; 1 where it is absent or no such number."""
    try:
        value = image.getexif().get(0x0112, 1)
    except DAMAGE:  # the picture itself may be sound
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _upright(image: Image) -> Image:
    from PIL import Image as Pillow

    image.load()  # first: a TIFF is turned by that, and then states no orientation
    turn = {
        2: Pillow.Transpose.FLIP_LEFT_RIGHT,
        3: Pillow.Transpose.ROTATE_180,
        4: Pillow.Transpose.FLIP_TOP_BOTTOM,
        5: Pillow.Transpose.TRANSPOSE,
        6: Pillow.Transpose.ROTATE_270,
        7: Pillow.Transpose.TRANSVERSE,
        8: Pillow.Transpose.ROTATE_90,
    }.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _has_alpha(image: Image) -> bool:
    return image.mode in _ALPHA_MODES or "transparency" in image.info


def _rgb_and_alpha(image: Image) -> tuple[Tensor, Tensor | None]:
    """[1, H, W, 3] and, unless the whole picture is opaque, [1, H, W, 1]; both in [0, 1]."""
    if image.mode.startswith("I"):
        return _deep_grey(image)
    if _has_alpha(image):
        rgba = _channels(image.convert("RGBA"), torch.uint8, 4) / 255
        return rgba[..., :3], rgba[..., 3:]
    return _channels(_plain_rgb(image), torch.uint8, 3) / 255, None


def _plain_rgb(image: Image) -> Image:
    if image.mode == "F":
        raise ValueError("float pixels have no defined range; save the picture with 8 or 16 bits per channel")
    return image.convert("RGB")


def _deep_grey(image: Image) -> tuple[Tensor, Tensor | None]:
    """16 bits per pixel, which ``convert("RGB")`` would clip to 255."""
    values = _channels(image.convert("I"), torch.int32, 1)
    if values.min() < 0 or values.max() > MAX_16_BIT:
        raise ValueError("pixels of 32 bits have no defined range; save the picture with 8 or 16 bits per channel")
    transparent = image.info.get("transparency")
    alpha = (values != transparent).to(torch.float32) if isinstance(transparent, int) else None
    return (values / MAX_16_BIT).expand(-1, -1, -1, 3).contiguous(), alpha


def _channels(image: Image, dtype: torch.dtype, num_channels: int) -> Tensor:
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=dtype)
    return pixels.view(1, image.height, image.width, num_channels).to(torch.float32)
