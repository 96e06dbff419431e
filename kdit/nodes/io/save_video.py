"""SAVE_VIDEO: frames -> MP4, GIF or animated WebP files with the settings inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from kdit.config.file_options import FileOptions
from kdit.config.runtime_config import frame_rate
from kdit.errors import InputError
from kdit.keys import IONodeType, TensorKey
from kdit.media.formats import IMAGE_SUFFIXES, NO_OPTIONS, check_output, file_suffix
from kdit.media.image_writer import write_image
from kdit.media.levels import to_uint8
from kdit.media.video_writer import write_video
from kdit.nodes.core.factory import IONodeFactory
from kdit.nodes.core.metadata import read_metadata
from kdit.nodes.core.node import IONode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.core.pin_hub import PinHub


@dataclass(frozen=True)
class SaveVideoSettings:
    """``paths``: one file per video, whose suffix chooses the format; ``fps``: a number or a ratio such as
    "24000/1001"; ``text``: the texts of each file, or nothing; ``options``: how they are encoded.
    """

    paths: Sequence[str]
    fps: str | int | float | Fraction
    text: Sequence[Mapping[str, str]] = ()
    options: FileOptions = NO_OPTIONS

    def __post_init__(self) -> None:
        if self.text and len(self.text) != len(self.paths):
            raise InputError(f"SAVE_VIDEO: {len(self.paths)} paths but text for {len(self.text)} videos")
        if len(set(self.paths)) != len(self.paths):
            raise InputError(f"SAVE_VIDEO: each video needs a path of its own, got {', '.join(self.paths)}")
        frame_rate(self.fps)


@IONodeFactory.register(IONodeType.SAVE_VIDEO, [None])
class SaveVideoNode(IONode):
    """Writes VIDEO, [B, F, H, W, 3] in [0, 1] or a list of such, one file per video; of one frame also a picture."""

    input_defs: ClassVar[list[PinDef]] = [TensorKey.VIDEO]

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Raises InputError, NonFiniteError or OutputError; nothing is written unless all videos are sound."""
        settings = read_metadata(SaveVideoSettings, context)
        value = pins.get_tensor(TensorKey.VIDEO)
        if value is None:
            raise InputError("SAVE_VIDEO: nothing is connected to VIDEO")
        videos = [to_uint8(video, "decoded video") for batch in value.tensors() for video in batch]
        if len(videos) != len(settings.paths):
            raise InputError(f"SAVE_VIDEO: {len(videos)} videos but {len(settings.paths)} paths")
        fps = frame_rate(settings.fps)
        for video, path in zip(videos, settings.paths, strict=True):
            num_frames, height, width = video.shape[:3]
            size, options = (width, height), settings.options
            check_output(path, "video", size=size, num_frames=num_frames, fps=fps, options=options)
        texts = settings.text or [{}] * len(videos)
        for video, path, text in zip(videos, settings.paths, texts, strict=True):
            if len(video) == 1 and file_suffix(path) in IMAGE_SUFFIXES:
                write_image(video[0], path, text, options=settings.options)
            else:
                write_video(video, path, fps, text, options=settings.options)
