"""Which kinds of results go into which files, told by suffix, and whether they can. Asked before any work is done."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from kdit.errors import OutputError
from kdit.output_file import check_writable

OutputKind = Literal["image", "video", "latents"]

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
VIDEO_SUFFIXES = (".mp4", ".gif", ".webp")
LATENT_SUFFIXES = (".safetensors",)
ALL_SUFFIXES = tuple(dict.fromkeys((*IMAGE_SUFFIXES, *VIDEO_SUFFIXES, *LATENT_SUFFIXES)))
DEFAULT_SUFFIX: dict[OutputKind, str] = {"image": ".png", "video": ".mp4", "latents": ".safetensors"}


@dataclass(frozen=True)
class _Limits:
    """What a file format can hold."""

    max_side: int
    even: bool = False
    max_fps: Fraction | None = None


_LIMITS = {
    ".png": _Limits(2**31 - 1),
    ".jpg": _Limits(65500),
    ".jpeg": _Limits(65500),
    ".webp": _Limits(16383, max_fps=Fraction(1000)),  # shown for whole milliseconds
    ".gif": _Limits(65535, max_fps=Fraction(50)),  # whole hundredths; viewers slow down what is shown for one
    ".mp4": _Limits(16384, even=True),  # colour is stored once for 2x2 pixels
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
) -> None:
    """Raise OutputError if ``path`` cannot become a file with a result of this kind.

    ``size`` (width, height), ``num_frames`` and ``fps`` are checked where they are given.
    """
    check_writable(path, suffixes(kind, num_frames))
    if kind == "latents":
        return
    check_limits(path, size=size, fps=fps if kind == "video" else None)
    if file_suffix(path) == ".mp4":
        from kdit.media.video_writer import require_encoder

        require_encoder(path)
    elif file_suffix(path) == ".webp":
        from PIL import features

        if not features.check("webp"):
            raise OutputError(f"cannot write {str(path)!r}: this build of Pillow has no WebP encoder")


def check_limits(path: str | Path, *, size: tuple[int, int] | None = None, fps: Fraction | None = None) -> None:
    """Raise OutputError for a size or frame rate that the format of ``path`` cannot hold."""
    suffix = file_suffix(path)
    limits = _LIMITS[suffix]
    if size is not None:
        if max(size) > limits.max_side:
            raise OutputError(
                f"cannot write {str(path)!r}: a {suffix} file is at most {limits.max_side} pixels wide and high, "
                f"got {size[0]}x{size[1]}"
            )
        if limits.even and any(n % 2 for n in size):
            width, height = (n + n % 2 for n in size)
            raise OutputError(
                f"cannot write {str(path)!r}: a {suffix} file holds even widths and heights only, got "
                f"{size[0]}x{size[1]}; make it {width}x{height}, or write a .gif or .webp"
            )
    if fps is not None and limits.max_fps is not None and fps > limits.max_fps:
        raise OutputError(
            f"cannot write {str(path)!r}: a {suffix} file shows at most {limits.max_fps} frames per second, got {fps}"
        )
