"""Pixels to PNG, JPEG and WebP files that carry their settings. Called by the SAVE_IMAGE and SAVE_VIDEO nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from kdit.config.checks import is_whole
from kdit.errors import OutputError
from kdit.media.formats import IMAGE_SUFFIXES, check_limits, file_suffix
from kdit.media.metadata import MAX_JPEG_EXIF, MetadataTooLongError, exif_of
from kdit.output_file import whole_file

JPEG_QUALITY = 95
LOSSY_SUFFIXES = (".jpg", ".jpeg", ".webp")


def write_image(image: Tensor, path: str | Path, text: Mapping[str, str], *, quality: int | None = None) -> None:
    """Write uint8 pixels [H, W, 3] and their texts; the suffix chooses the format. Raises OutputError.

    ``quality``, 1 to 100, is for JPEG (95 if not given) and WebP (lossless if not given). The values of the
    pixels are stored as they are: no profile, no gamma, in a JPEG full colour resolution. The file
    appears under its name only when it is complete.
    """
    assert image.ndim == 3 and image.shape[-1] == 3, tuple(image.shape)
    suffix = file_suffix(path)
    if suffix not in IMAGE_SUFFIXES:
        raise OutputError(f"cannot write {str(path)!r}: a picture's name ends in {' or '.join(IMAGE_SUFFIXES)}")
    check_quality_for(path, quality)
    check_limits(path, size=(image.shape[1], image.shape[0]))
    with whole_file(path) as file:
        try:
            if suffix == ".png":
                _write_png(image, file, text)
            elif suffix == ".webp":
                _write_webp(image, file, text, quality)
            else:
                _write_jpeg(image, file, text, quality or JPEG_QUALITY)
        except MetadataTooLongError as error:
            raise OutputError(f"cannot write {str(path)!r}: {error} have no room in a {suffix}; use .png") from None


def check_quality_for(path: str | Path, quality: int | None) -> None:
    """Raise OutputError unless ``quality`` is None, or a whole number from 1 to 100 and ``path`` a JPEG or WebP."""
    if quality is None:
        return
    if file_suffix(path) not in LOSSY_SUFFIXES:
        raise OutputError(f"cannot write {str(path)!r}: quality is for {' and '.join(LOSSY_SUFFIXES)} files")
    if not is_whole(quality, low=1, high=100):
        raise OutputError(f"quality must be a whole number from 1 to 100, got {quality!r}")


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
