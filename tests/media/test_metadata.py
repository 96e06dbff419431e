"""Settings read back from files: sound, foreign, damaged and hostile ones."""

import json
import struct
import zlib
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from PIL import Image, PngImagePlugin
from safetensors.torch import save_file

from kdit.errors import InputError
from kdit.media import metadata
from kdit.media.image_writer import write_image
from kdit.media.metadata import read_settings
from kdit.media.video_writer import write_video

BLACK = torch.zeros(16, 16, 3, dtype=torch.uint8)
ALL = [".png", ".jpg", ".webp", ".gif", ".mp4", ".safetensors"]


def write(path: Path, text: str | None) -> Path:
    """A file of any kind, with ``text`` where its settings belong."""
    texts = {} if text is None else {"kdit": text}
    if path.suffix == ".safetensors":
        save_file({"latents": torch.zeros(1)}, path, metadata=texts or None)
    elif path.suffix in (".gif", ".mp4"):
        write_video(BLACK.expand(2, -1, -1, -1), path, Fraction(8), texts)
    else:
        write_image(BLACK, path, texts)
    return path


@pytest.mark.parametrize("suffix", ALL)
def test_the_content_tells_the_kind_of_file(suffix: str, tmp_path: Path) -> None:
    settings = {
        "prompt": 'かわいい 😄 ō "quoted" \\ \n',
        "seed": 2**63 - 1,
        "size": [16, 16],
        "cfg_scale": 3.5,
        "x": None,
    }
    path = write(tmp_path / f"a{suffix}", json.dumps(settings, ensure_ascii=False))
    renamed = path.rename(tmp_path / "renamed.txt")
    assert read_settings(renamed) == settings == read_settings(str(renamed))


@pytest.mark.parametrize("suffix", ALL)
def test_a_file_without_settings_is_told(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"a\{suffix}' holds no settings of kdit"):
        read_settings(write(tmp_path / f"a{suffix}", None))


@pytest.mark.parametrize("suffix", ALL)
@pytest.mark.parametrize("text", ["{cut", '"text"', "[1, 2]", '{"a":' * 100_000], ids=["cut", "text", "list", "deep"])
def test_settings_that_are_no_object_are_told(suffix: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"a\{suffix}' holds "):
        read_settings(write(tmp_path / f"a{suffix}", text))


def test_comments_of_other_programs_are_no_settings(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9286] = b"ASCII\0\0\0made with love"
    picture = Image.new("RGB", (4, 4))
    picture.save(tmp_path / "a.jpg", exif=exif)
    picture.save(tmp_path / "a.gif", comment=b"made with love")
    info = PngImagePlugin.PngInfo()
    info.add_text("parameters", "a fox, steps: 20")
    picture.save(tmp_path / "a.png", pnginfo=info)
    save_file({"x": torch.zeros(1)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    for path in tmp_path.iterdir():
        with pytest.raises(InputError, match="holds no settings of kdit"):
            read_settings(path)


def test_exif_whose_byte_order_was_turned_around_is_read(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9286] = b"UNICODE\0" + '{"prompt": "狐"}'.encode("utf-16-be")
    Image.new("RGB", (4, 4)).save(tmp_path / "a.jpg", exif=exif)
    assert read_settings(tmp_path / "a.jpg") == {"prompt": "狐"}


@pytest.mark.parametrize("suffix", ALL)
@pytest.mark.parametrize("left", [0, 7, 20, 60])
def test_a_cut_file_is_one_clear_error(suffix: str, left: int, tmp_path: Path) -> None:
    path = write(tmp_path / f"a{suffix}", '{"prompt": "a"}')
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(InputError, match=rf"a\{suffix}' (holds|cannot be read)"):
        read_settings(path)


def test_files_that_are_none_are_told(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a heart")
    for path, told in (
        (tmp_path / "no.png", "does not exist"),
        (tmp_path, "is not a file"),
        (tmp_path / "text.txt", "holds no settings"),
    ):
        with pytest.raises(InputError, match=told):
            read_settings(path)


def test_sizes_are_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "MAX_SETTINGS_BYTES", 1000)
    for suffix in ALL:
        with pytest.raises(InputError, match=r"more than 1000 bytes|claims \d+ bytes"):
            read_settings(write(tmp_path / f"a{suffix}", json.dumps({"prompt": "x" * 2000})))
    (tmp_path / "huge.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(InputError, match=f"claims {2**62} bytes"):
        read_settings(tmp_path / "huge.safetensors")
    exif = Image.Exif()  # a megabyte in a few bytes
    exif.get_ifd(0x8769)[0x9286] = b"kdit-zip" + zlib.compress(b'{"a":"' + b"x" * 2**20)
    Image.new("RGB", (4, 4)).save(tmp_path / "bomb.jpg", exif=exif)
    with pytest.raises(InputError, match="more than 1000 bytes"):
        read_settings(tmp_path / "bomb.jpg")


def test_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (eval, (f"open({str(canary)!r}, 'w').close()",))

    for name in ("a.safetensors", "a.png", "a.mp4"):
        torch.save(Payload(), tmp_path / name)
        with pytest.raises(InputError):
            read_settings(tmp_path / name)
    assert not canary.exists()


def test_a_list_of_streams_opens_no_other_file(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret.mp4", '{"prompt": "secret"}')
    for text in (f"ffconcat version 1.0\nfile '{secret}'\n", f"#EXTM3U\n#EXTINF:1,\n{secret}\n#EXT-X-ENDLIST\n"):
        (tmp_path / "list.mp4").write_bytes(b"\0\0\0\x10ftyp" + text.encode())
        (tmp_path / "plain.mp4").write_text(text)
        for name in ("list.mp4", "plain.mp4"):
            with pytest.raises(InputError):
                read_settings(tmp_path / name)
