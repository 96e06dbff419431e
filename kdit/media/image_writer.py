"""Pixels to PNG, JPEG and WebP files that carry their settings. Called by the SAVE_IMAGE and SAVE_VIDEO nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from kdit.config.file_options import FileOptions
from kdit.errors import OutputError
from kdit.media.formats import IMAGE_SUFFIXES, NO_OPTIONS, check_encoder, check_limits, check_text, file_suffix
from kdit.media.metadata import MAX_JPEG_EXIF, exif_of
from kdit.output_file import whole_file

JPEG_QUALITY = 95


def write_image(image: Tensor, path: str | Path, text: Mapping[str, str], *, options: FileOptions = NO_OPTIONS) -> None:
    """Write uint8 pixels [H, W, 3] and their texts; the suffix chooses the format. Raises OutputError.

    ``options.quality`` is for JPEG (95 if not given) and WebP (lossless if not given). The values of the
    pixels are stored as they are: no profile, no gamma, in a JPEG full colour resolution. The file
    appears under its name only when it is complete.
    """
    assert image.ndim == 3 and image.shape[-1] == 3, tuple(image.shape)
    suffix = file_suffix(path)
    if suffix not in IMAGE_SUFFIXES:
        raise OutputError(f"cannot write {str(path)!r}: a picture's name ends in {' or '.join(IMAGE_SUFFIXES)}")
    check_encoder(path, options)
    check_limits(path, size=(image.shape[1], image.shape[0]))
    check_text(path, text)
    with whole_file(path) as file:
        if suffix == ".png":
            _write_png(image, file, text)
        elif suffix == ".webp":
            _write_webp(image, file, text, options.quality)
        else:
            _write_jpeg(image, file, text, options.quality or JPEG_QUALITY)


def _write_png(image: Tensor, file: BinaryIO, text: Mapping[str, str]) -> None:
    from PIL import Image, PngImagePlugin  # Pillow is not needed until a file is written

    chunks = PngImagePlugin.PngInfo()
    for key, value in text.items():
        chunks.add_itxt(key, value)
    Image.fromarray(image.contiguous().numpy()).save(file, format="PNG", pnginfo=chunks)


def _write_jpeg(image: Tensor, file: BinaryIO, text: Mapping[str, str], quality: int) -> None:
    from PIL import Image

    exif = exif_of(text, MAX_JPEG_EXIF)
    picture = Image.fromarray(image.contiguous().numpy())
    picture.save(file, format="JPEG", quality=quality, subsampling=0, exif=exif)


def _write_webp(image: Tensor, file: BinaryIO, text: Mapping[str, str], quality: int | None) -> None:
    from PIL import Image

    picture = Image.fromarray(image.contiguous().numpy())
    lossless = quality is None
    # Of a lossless file "quality" is the effort.
    picture.save(file, format="WEBP", lossless=lossless, quality=80 if lossless else quality, exif=exif_of(text))
