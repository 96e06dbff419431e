"""Which kinds of results go into which files, told by suffix, and whether they can. Asked before any work is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from kdit.config.file_options import FileOptions, PixelFormat
from kdit.errors import OutputError
from kdit.media.metadata import KEY, MAX_JPEG_EXIF, MAX_SETTINGS_BYTES, MetadataTooLongError, exif_of
from kdit.output_file import check_writable

OutputKind = Literal["image", "video", "latents"]

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
VIDEO_SUFFIXES = (".mp4", ".gif", ".webp")
LATENT_SUFFIXES = (".safetensors",)
ALL_SUFFIXES = tuple(dict.fromkeys((*IMAGE_SUFFIXES, *VIDEO_SUFFIXES, *LATENT_SUFFIXES)))
FULL_COLOUR: PixelFormat = "yuv444p"
DEFAULT_SUFFIX: dict[OutputKind, str] = {"image": ".png", "video": ".mp4", "latents": ".safetensors"}


NO_OPTIONS = FileOptions()


@dataclass(frozen=True)
class _Format:
    """What a file format can hold, and the fields of FileOptions that it has."""

    max_side: int
    options: tuple[str, ...] = ()
    max_fps: Fraction | None = None


_FORMATS = {
    ".png": _Format(2**31 - 1),
    ".jpg": _Format(65500, ("quality",)),
    ".jpeg": _Format(65500, ("quality",)),
    ".webp": _Format(16383, ("quality",), max_fps=Fraction(1000)),  # shown for whole milliseconds
    ".gif": _Format(65535, max_fps=Fraction(50)),  # whole hundredths; viewers slow down what is shown for one
    ".mp4": _Format(16384, ("crf", "pixel_format")),
}


def file_suffix(path: str | Path) -> str:
    """The suffix by which a file's format is chosen, in lower case."""
    return Path(path).suffix.lower()


def suffixes(kind: OutputKind, num_frames: int | None = None) -> tuple[str, ...]:
    """Suffixes of the files that can hold ``kind``; a video of one frame is a picture too."""
    if kind == "latents":
        return LATENT_SUFFIXES
    if kind == "image":
        return IMAGE_SUFFIXES
    return tuple(dict.fromkeys((*VIDEO_SUFFIXES, *IMAGE_SUFFIXES))) if num_frames == 1 else VIDEO_SUFFIXES


def check_output(
    path: str | Path,
    kind: OutputKind,
    *,
    size: tuple[int, int] | None = None,
    num_frames: int | None = None,
    fps: Fraction | None = None,
    options: FileOptions = NO_OPTIONS,
) -> None:
    """Raise OutputError if ``path`` cannot become a file with a result of this kind, encoded with ``options``.

    ``size`` (width, height), ``num_frames`` and ``fps`` are checked where they are given.
    """
    check_writable(path, suffixes(kind, num_frames))
    check_encoder(path, options)
    if kind != "latents":
        check_limits(path, size=size, fps=fps if kind == "video" else None, options=options)


def check_encoder(path: str | Path, options: FileOptions) -> None:
    """Raise OutputError for an option that the format of ``path`` does not have, or an encoder that is missing."""
    suffix = file_suffix(path)
    own = _FORMATS[suffix].options if suffix in _FORMATS else ()
    for name in options.given():
        if name not in own:
            having = [other for other, form in _FORMATS.items() if name in form.options]
            raise OutputError(f"cannot write {str(path)!r}: `{name}` is for {', '.join(having)} files")
    if suffix == ".mp4":
        from kdit.media.video_writer import require_encoder

        require_encoder(path)
    elif suffix == ".webp":
        from PIL import features

        if not features.check("webp"):
            raise OutputError(f"cannot write {str(path)!r}: this build of Pillow has no WebP encoder")


def check_text(path: str | Path, text: Mapping[str, str]) -> None:
    """Raise OutputError for texts that have no room in the file, or that nobody would read back."""
    num_bytes = len(text.get(KEY, "").encode())
    if num_bytes > MAX_SETTINGS_BYTES:
        raise OutputError(
            f"cannot write {str(path)!r}: settings of {num_bytes} bytes; a file holds {MAX_SETTINGS_BYTES} at most"
        )
    if file_suffix(path) in (".jpg", ".jpeg"):
        try:
            exif_of(text, MAX_JPEG_EXIF)
        except MetadataTooLongError as error:
            told = f"cannot write {str(path)!r}: {error} have no room in a JPEG; use .png or .webp"
            raise OutputError(told) from None


def check_limits(
    path: str | Path,
    *,
    size: tuple[int, int] | None = None,
    fps: Fraction | None = None,
    options: FileOptions = NO_OPTIONS,
) -> None:
    """Raise OutputError for a size or frame rate that the format of ``path`` cannot hold."""
    suffix = file_suffix(path)
    limits = _FORMATS[suffix]
    if size is not None:
        if max(size) > limits.max_side:
            raise OutputError(
                f"cannot write {str(path)!r}: a {suffix} file is at most {limits.max_side} pixels wide and high, "
                f"got {size[0]}x{size[1]}"
            )
        halved = "pixel_format" in limits.options and options.pixel_format != FULL_COLOUR
        if halved and any(n % 2 for n in size):
            width, height = (n + n % 2 for n in size)
            raise OutputError(
                f"cannot write {str(path)!r}: a {suffix} file in yuv420p, which stores colour once for 2x2 pixels, "
                f"has even widths and heights, got {size[0]}x{size[1]}; make it {width}x{height}, choose "
                f"`pixel_format` {FULL_COLOUR}, or write a .gif or .webp"
            )
    if fps is not None and limits.max_fps is not None and fps > limits.max_fps:
        raise OutputError(
            f"cannot write {str(path)!r}: a {suffix} file shows at most {limits.max_fps} frames per second, got {fps}"
        )
