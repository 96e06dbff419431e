"""Picture files: their pixels, texts, and what is refused."""

import json
import os
from pathlib import Path

import pytest
import torch
from PIL import Image, PngImagePlugin
from torch import Tensor

from kdit.config import FileOptions
from kdit.errors import OutputError
from kdit.media.image_writer import write_image
from kdit.media.metadata import read_settings

SUFFIXES = [".png", ".jpg", ".jpeg", ".webp", ".PNG"]
PROMPT = "ein Füchslein 狐 🦊\nか\x00わ"
TEXT = {"kdit": json.dumps({"prompt": PROMPT, "seed": 3}, ensure_ascii=False), "Software": "kdit 9"}
COLOURS = [(0, 0, 0), (255, 255, 255), (255, 0, 0), (0, 255, 0), (0, 0, 255), (128, 128, 128), (200, 120, 40)]


def patches() -> Tensor:
    """One 16 x 16 patch per colour, side by side."""
    return torch.tensor(COLOURS, dtype=torch.uint8).repeat_interleave(16, 0).expand(16, -1, -1)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_colours_and_settings_come_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    write_image(patches(), path, TEXT)
    with Image.open(path) as image:
        assert (image.mode, image.size) == ("RGB", (16 * len(COLOURS), 16))
        assert "icc_profile" not in image.info and "gamma" not in image.info
        decoded = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(16, -1, 3)
    furthest = (decoded.int() - patches().int()).abs().max().item()
    assert furthest <= (2 if suffix in (".jpg", ".jpeg") else 0)
    assert read_settings(path) == {"prompt": PROMPT, "seed": 3}


def test_the_program_is_named_where_viewers_look(tmp_path: Path) -> None:
    for suffix in (".png", ".jpg", ".webp"):
        path = tmp_path / f"a{suffix}"
        write_image(patches(), path, TEXT)
        with Image.open(path) as image:
            if isinstance(image, PngImagePlugin.PngImageFile):
                assert image.text == TEXT
            else:
                assert image.getexif()[0x0131] == "kdit 9"
                assert 0x0112 not in image.getexif()  # upright, whatever the input was


def test_quality_is_honoured(tmp_path: Path) -> None:
    noise = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for suffix in (".jpg", ".webp"):
        sizes = []
        for quality in (100, 50, 1):
            write_image(noise, tmp_path / f"a{suffix}", {}, options=FileOptions(quality=quality))
            sizes.append((tmp_path / f"a{suffix}").stat().st_size)
        assert sizes == sorted(set(sizes), reverse=True)


def test_options_of_other_formats_are_refused(tmp_path: Path) -> None:
    for name, options, told in (
        ("a.png", FileOptions(quality=50), r"`quality` is for \.jpg, \.jpeg, \.webp files"),
        ("a.jpg", FileOptions(crf=20), r"`crf` is for \.mp4 files"),
        ("a.webp", FileOptions(pixel_format="yuv444p"), r"`pixel_format` is for \.mp4 files"),
    ):
        with pytest.raises(OutputError, match=told):
            write_image(patches(), tmp_path / name, {}, options=options)
    assert os.listdir(tmp_path) == []


def test_other_names_and_sizes_are_refused(tmp_path: Path) -> None:
    for name in ("a.tif", "a", "a.png.txt", "a.mp4"):
        with pytest.raises(OutputError, match=r"name ends in \.png or \.jpg"):
            write_image(patches(), tmp_path / name, {})
    wide = torch.zeros(1, 16384, 3, dtype=torch.uint8)
    with pytest.raises(OutputError, match=r"a \.webp file is at most 16383 pixels wide and high, got 16384x1"):
        write_image(wide, tmp_path / "a.webp", {})
    write_image(wide, tmp_path / "a.jpg", {})
    assert os.listdir(tmp_path) == ["a.jpg"]


def test_settings_of_any_length_fit_where_the_format_has_room(tmp_path: Path) -> None:
    words = " ".join(f"狐{i}" for i in range(8_000))  # more than a JPEG's EXIF holds as it is
    for suffix in (".png", ".webp", ".jpg"):
        write_image(patches(), tmp_path / f"a{suffix}", {"kdit": json.dumps({"prompt": words}, ensure_ascii=False)})
        assert read_settings(tmp_path / f"a{suffix}")["prompt"] == words


def test_a_jpeg_without_room_is_refused_whole(tmp_path: Path) -> None:
    noise = os.urandom(150_000).hex()
    with pytest.raises(OutputError, match=r"no room in a JPEG; use \.png or \.webp"):
        write_image(patches(), tmp_path / "a.jpg", {"kdit": json.dumps({"prompt": noise})})
    assert os.listdir(tmp_path) == []


def test_a_broken_write_keeps_the_old_file_and_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.png"
    target.write_bytes(b"old")

    def full_disk(self: Image.Image, file: object, **options: object) -> None:
        file.write(b"half a picture")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full_disk)
    with pytest.raises(OutputError, match=r"cannot write '.*a\.png': No space left on device"):
        write_image(torch.zeros(2, 2, 3, dtype=torch.uint8), target, {})
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.png"]


def test_an_interrupted_write_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Image.Image, file: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_image(torch.zeros(2, 2, 3, dtype=torch.uint8), tmp_path / "a.png", {})
    assert os.listdir(tmp_path) == []


def test_an_existing_file_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "a.png"
    for value in (0, 255):
        write_image(torch.full((2, 2, 3), value, dtype=torch.uint8), target, {})
    with Image.open(target) as image:
        assert image.getpixel((0, 0)) == (255, 255, 255)
