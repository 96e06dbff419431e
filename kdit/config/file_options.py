"""FileOptions: how the files of a request are encoded. Each option belongs to some formats (kdit/media/formats.py)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from kdit.config.checks import is_whole
from kdit.errors import ConfigError

PixelFormat = Literal["yuv420p", "yuv444p"]
MAX_QUALITY, MAX_CRF = 100, 51


@dataclass(frozen=True, kw_only=True, slots=True)
class FileOptions:
    """None means "not given": the format's own default applies. An option that is not one of a file's format is
    refused before anything is computed.
    """

    quality: int | None = None  # JPEG and WebP: 1 to 100
    crf: int | None = None  # MP4: 0, the best, to 51
    pixel_format: PixelFormat | None = None  # MP4: colour once for 2x2 pixels, or for each

    def __post_init__(self) -> None:
        for name, low, high in (("quality", 1, MAX_QUALITY), ("crf", 0, MAX_CRF)):
            value = getattr(self, name)
            if value is not None and not is_whole(value, low=low, high=high):
                raise ConfigError(f"`FileOptions.{name}` must be a whole number from {low} to {high}, got {value!r}")
        if self.pixel_format is not None and self.pixel_format not in get_args(PixelFormat):
            known = " or ".join(get_args(PixelFormat))
            raise ConfigError(f"`FileOptions.pixel_format` must be {known}, got {self.pixel_format!r}")

    def given(self) -> dict[str, object]:
        """What is not None, by name."""
        values = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {name: value for name, value in values if value is not None}
