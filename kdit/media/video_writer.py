"""Frames to MP4 (H.264 through PyAV), GIF and animated WebP with their settings. Called by the SAVE_VIDEO node."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from torch import Tensor

from kdit.config.file_options import FileOptions, PixelFormat
from kdit.errors import OutputError
from kdit.media.formats import NO_OPTIONS, VIDEO_SUFFIXES, check_encoder, check_limits, check_text, file_suffix
from kdit.media.metadata import KEY, exif_of
from kdit.output_file import whole_file

if TYPE_CHECKING:
    from av.video.stream import VideoStream
    from PIL.Image import Image

ENCODER = "libx264"
PIXEL_FORMAT: PixelFormat = "yuv420p"
CRF = 17  # hardly to be told from the frames
WEBP_QUALITY = 90
MIN_TICKS = 1000  # in a second of an MP4
MAX_DENOMINATOR = 100_000  # of frames per second: what a file states is two 32-bit numbers
_BT709, _LIMITED_RANGE, _FULL_RANGE = 1, 1, 2  # as the codec's standard numbers them


def write_video(
    frames: Tensor,
    path: str | Path,
    fps: Fraction,
    text: Mapping[str, str],
    *,
    options: FileOptions = NO_OPTIONS,
) -> None:
    """Write uint8 frames [F, H, W, 3], ``fps`` in a second; the suffix chooses the format. Raises OutputError.

    An MP4 is, unless ``options`` say otherwise, H.264 in yuv420p at crf 17, and then has even sides; in any case bt709
    in limited range, converted and tagged. A WebP has quality 90 if not given. Frames last 1/fps; a GIF
    and a WebP, which know hundredths and thousandths of a second only, round each frame's end. The file
    appears under its name only when it is complete.
    """
    assert frames.ndim == 4 and frames.shape[-1] == 3 and len(frames), tuple(frames.shape)
    suffix = file_suffix(path)
    if suffix not in VIDEO_SUFFIXES:
        raise OutputError(f"cannot write {str(path)!r}: a video's name ends in {' or '.join(VIDEO_SUFFIXES)}")
    check_encoder(path, options)
    check_text(path, text)
    rate = Fraction(fps).limit_denominator(MAX_DENOMINATOR)
    if rate <= 0:
        raise OutputError(f"cannot write {str(path)!r}: fps must be above 0, got {fps}")
    check_limits(path, size=(frames.shape[2], frames.shape[1]), fps=rate, options=options)
    with whole_file(path) as file:
        if suffix == ".mp4":
            _write_mp4(frames, file, path, rate, text.get(KEY), options)
        elif suffix == ".gif":
            _write_gif(frames, file, rate, text.get(KEY))
        else:
            _write_webp(frames, file, rate, text, options.quality or WEBP_QUALITY)


def require_encoder(path: str | Path) -> None:
    """Raise OutputError if this machine cannot encode H.264."""
    try:
        import av
    except ImportError as error:
        raise OutputError(f"cannot write {str(path)!r}: PyAV is not installed (pip install av): {error}") from error
    if ENCODER not in av.codecs_available:
        raise OutputError(f"cannot write {str(path)!r}: this build of PyAV has no {ENCODER}; write a .gif or .webp")


def _write_mp4(
    frames: Tensor, file: BinaryIO, path: str | Path, rate: Fraction, settings: str | None, options: FileOptions
) -> None:
    import av

    pixel_format = options.pixel_format or PIXEL_FORMAT
    crf = CRF if options.crf is None else options.crf

    ticks = rate.numerator * math.ceil(MIN_TICKS / rate.numerator)  # a frame is a whole number of these
    muxer = {"movflags": "+faststart", "movie_timescale": str(ticks)}
    try:
        # By name: to put the index first, FFmpeg reads back what it has written.
        with av.open(file.name, "w", format="mp4", options=muxer) as container:
            if settings is not None:
                container.metadata["comment"] = settings
            stream = cast("VideoStream", container.add_stream(ENCODER, rate=rate, options={"crf": str(crf)}))
            stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], pixel_format
            _set_up(stream, rate)
            for index, frame in enumerate(frames):
                picture = av.VideoFrame.from_ndarray(frame.contiguous().numpy(), format="rgb24")
                converted = picture.reformat(
                    format=pixel_format,
                    dst_colorspace=_BT709,
                    src_color_range=_FULL_RANGE,
                    dst_color_range=_LIMITED_RANGE,
                    interpolation="LANCZOS",
                )
                converted.pts, converted.time_base = index, 1 / rate
                container.mux(stream.encode(converted))
            container.mux(stream.encode(None))
    except av.error.FFmpegError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def _set_up(stream: VideoStream, rate: Fraction) -> None:
    context = stream.codec_context
    context.time_base = stream.time_base = 1 / rate
    context.color_primaries = context.color_trc = context.colorspace = _BT709
    context.color_range = _LIMITED_RANGE


def _write_gif(frames: Tensor, file: BinaryIO, rate: Fraction, settings: str | None) -> None:
    first, rest = _pictures(frames)
    durations = [10 * hundredths for hundredths in frame_durations(len(frames), rate, 100)]
    comment = b"" if settings is None else settings.encode()
    first.save(
        file,
        format="GIF",
        save_all=True,
        append_images=rest,
        duration=durations,
        loop=0,
        comment=comment,
        optimize=False,
    )


def _write_webp(frames: Tensor, file: BinaryIO, rate: Fraction, text: Mapping[str, str], quality: int) -> None:
    first, rest = _pictures(frames)
    durations = frame_durations(len(frames), rate, 1000)
    first.save(
        file,
        format="WEBP",
        save_all=True,
        append_images=rest,
        duration=durations,
        loop=0,
        quality=quality,
        exif=exif_of(text),
    )


def _pictures(frames: Tensor) -> tuple[Image, Iterator[Image]]:
    from PIL import Image

    pictures = (Image.fromarray(frame.contiguous().numpy()) for frame in frames)
    return next(pictures), pictures


def frame_durations(count: int, rate: Fraction, per_second: int) -> Sequence[int]:
    """How long each frame is shown, in whole parts of a second, such that no frame starts off by more than half one."""
    ends = [math.floor(Fraction(i * per_second) / rate + Fraction(1, 2)) for i in range(count + 1)]
    return [end - start for start, end in pairwise(ends)]
