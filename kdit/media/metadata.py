"""Settings inside files: how EXIF carries them, and reading them back from every format that kdit writes.

Reading takes text out of a file and nothing else: no code, no other file, no more than MAX_SETTINGS_BYTES.
"""

from __future__ import annotations

import json
import struct
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kdit.errors import InputError
from kdit.media.damage import DAMAGE

if TYPE_CHECKING:
    from PIL.Image import Exif, Image

KEY = "kdit"  # of the settings, a JSON object, among the texts of a file
SOFTWARE_KEY = "Software"
MAX_SETTINGS_BYTES = 8 * 2**20
MAX_JPEG_EXIF = 65_000  # one segment holds 65533 bytes

_EXIF_IFD, _SOFTWARE, _USER_COMMENT = 0x8769, 0x0131, 0x9286
_UTF16, _PACKED = b"UNICODE\0", b"kdit-zip"  # first 8 bytes of a user comment: how the rest is written


class MetadataTooLongError(ValueError):
    """Texts that a file format has no room for."""


def exif_of(text: Mapping[str, str], max_bytes: int | None = None) -> Exif:
    """EXIF with the settings as user comment, in UTF-16 as the standard has it, or packed where that is too long.

    Raises MetadataTooLongError if even the packed settings exceed ``max_bytes``.
    """
    from PIL.Image import Exif

    exif = Exif()
    if SOFTWARE_KEY in text:
        exif[_SOFTWARE] = text[SOFTWARE_KEY]
    if KEY in text:
        settings = text[KEY]
        comment = _UTF16 + settings.encode("utf-16-le")
        if max_bytes is not None and len(comment) > max_bytes:
            comment = _PACKED + zlib.compress(settings.encode(), 9)
        if max_bytes is not None and len(comment) > max_bytes:
            raise MetadataTooLongError(f"settings of {len(settings)} characters")
        exif.get_ifd(_EXIF_IFD)[_USER_COMMENT] = comment
    return exif


def read_settings(path: str | Path) -> dict[str, object]:
    """The settings that kdit wrote into a picture, a video or a file of latents; the content tells the format.

    Raises InputError if the file is none of them, is damaged, or holds no settings.
    """
    name = str(path)
    if not Path(path).is_file():
        raise InputError(f"{name!r} does not exist" if not Path(path).exists() else f"{name!r} is not a file")
    try:
        text = _settings_text(Path(path))
    except DAMAGE as error:
        raise InputError(f"{name!r} cannot be read: {str(error) or type(error).__name__}") from error
    if not text:
        raise InputError(f"{name!r} holds no settings of kdit; {' '.join(_NAMES)} files that kdit wrote have them")
    if len(text) > MAX_SETTINGS_BYTES:
        raise InputError(f"{name!r} holds settings of more than {MAX_SETTINGS_BYTES} bytes")
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise InputError(f"{name!r} holds text in the place of settings that is no JSON object; was it edited?")
    return settings


def _settings_text(path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(16)
    for starts, read in _READERS:
        if starts(head):
            return read(path)
    return None


def _is_latents(head: bytes) -> bool:
    return len(head) > 8 and head[8:9] == b"{"


def _from_latents(path: Path) -> str | None:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > MAX_SETTINGS_BYTES:
            raise ValueError(f"its header claims {length} bytes")
        header = json.loads(file.read(length))
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    text = metadata.get(KEY) if isinstance(metadata, dict) else None
    return text if isinstance(text, str) else None


def _from_image(path: Path) -> str | None:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about damage that does not touch the settings
        try:
            with Image.open(path, formats=("PNG", "JPEG", "WEBP", "GIF")) as image:
                return _TEXT_OF[image.format or ""](image)
        except Image.DecompressionBombError as error:
            raise ValueError(str(error)) from error


def _png_text(image: Image) -> str | None:
    text = image.info.get(KEY)
    return text if isinstance(text, str) else None


def _exif_text(image: Image) -> str | None:
    comment = image.getexif().get_ifd(_EXIF_IFD).get(_USER_COMMENT)
    if not isinstance(comment, bytes):
        return None
    start, body = comment[:8], comment[8:]
    if start == _PACKED:
        unpacker = zlib.decompressobj()
        return unpacker.decompress(body, MAX_SETTINGS_BYTES + 1).decode()
    if start != _UTF16:
        return None
    # Programs that rewrite EXIF may turn its byte order around. Settings start with a brace.
    return body.decode("utf-16-le" if body[:2] == b"{\0" else "utf-16-be")


def _gif_text(image: Image) -> str | None:
    comment = image.info.get("comment")
    return comment.decode() if isinstance(comment, bytes) and comment.startswith(b"{") else None


def _from_video(path: Path) -> str | None:
    import av

    with path.open("rb") as file:  # not by name, which FFmpeg would take for an address
        try:
            with av.open(file, format="mp4") as container:
                return container.metadata.get("comment")
        except av.error.FFmpegError as error:
            raise ValueError(str(error.strerror)) from error


class _TextOf(Protocol):
    def __call__(self, image: Image, /) -> str | None: ...


_TEXT_OF: dict[str, _TextOf] = {"PNG": _png_text, "JPEG": _exif_text, "WEBP": _exif_text, "GIF": _gif_text}
_NAMES = (".png", ".jpg", ".webp", ".gif", ".mp4", ".safetensors")
_READERS: tuple[tuple[Callable[[bytes], bool], Callable[[Path], str | None]], ...] = (
    (lambda head: head.startswith((b"\x89PNG", b"\xff\xd8\xff", b"GIF8")), _from_image),
    (lambda head: head.startswith(b"RIFF") and head[8:12] == b"WEBP", _from_image),
    (lambda head: head[4:8] == b"ftyp", _from_video),
    (_is_latents, _from_latents),
)
