"""Picture and mask files to pixels: every mode, every orientation, and files that must be refused."""

import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image

from kdit.errors import InputError
from kdit.media.image_reader import BLACK, image_size, read_image, read_mask

FORMATS = [("png", {}), ("jpg", {"quality": 100}), ("webp", {"lossless": True}), ("tif", {})]


def saved(image: Image.Image, path: Path, **options: object) -> str:
    image.save(path, **options)  # type: ignore[arg-type]
    return str(path)


def png(width: int, height: int, depth: int, colour_type: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG that Pillow cannot write: its header and rows (each after a filter byte) as they are given."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )


def test_bytes_become_fractions(tmp_path: Path) -> None:
    image = Image.new("RGB", (2, 1))
    image.putpixel((1, 0), (51, 102, 255))
    pixels = read_image(saved(image, tmp_path / "a.png"))
    torch.testing.assert_close(pixels, torch.tensor([[[[0, 0, 0], [0.2, 0.4, 1.0]]]]))


@pytest.mark.parametrize(("suffix", "options"), FORMATS, ids=[name for name, _ in FORMATS])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_upright_on_every_route(
    tmp_path: Path, suffix: str, options: dict[str, object], orientation: int
) -> None:
    """32 x 16 with a white upper left quarter, stored as a camera of that orientation would."""
    upright = Image.new("RGB", (32, 16), "black")
    upright.paste("white", (0, 0, 16, 8))
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Pillow's number of the turn that the viewer undoes
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(stored, tmp_path / f"a.{suffix}", exif=exif, **options)
    assert image_size(path) == (32, 16)
    for pixels in (read_image(path), read_mask(path)):
        assert pixels.shape[1:3] == (16, 32)
        assert pixels[0, 1:7, 1:15].min() > 0.9
        assert pixels[0, 9:].max() < 0.1 and pixels[0, :, 17:].max() < 0.1


@pytest.mark.parametrize("orientation", [0, 9, 77])
def test_an_orientation_that_does_not_exist_turns_nothing(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(Image.new("RGB", (4, 2)), tmp_path / "a.jpg", exif=exif)
    assert image_size(path) == (4, 2) and read_image(path).shape == (1, 2, 4, 3)


@pytest.mark.parametrize(
    ("mode", "pixel", "expected"),
    [
        ("RGBA", (255, 0, 0, 0), [1, 1, 1]),
        ("RGBA", (255, 0, 0, 51), [1, 0.8, 0.8]),
        ("LA", (0, 255), [0, 0, 0]),
        ("LA", (0, 51), [0.8, 0.8, 0.8]),
        ("L", 51, [0.2, 0.2, 0.2]),
        ("1", 1, [1, 1, 1]),
    ],
)
def test_alpha_is_laid_over_white_and_grey_becomes_rgb(
    tmp_path: Path, mode: str, pixel: int | tuple[int, ...], expected: list[float]
) -> None:
    pixels = read_image(saved(Image.new(mode, (1, 1), pixel), tmp_path / "a.png"))
    torch.testing.assert_close(pixels[0, 0, 0], torch.tensor(expected, dtype=torch.float32))


def test_the_background_can_be_chosen(tmp_path: Path) -> None:
    path = saved(Image.new("RGBA", (1, 1), (255, 0, 0, 51)), tmp_path / "a.png")
    torch.testing.assert_close(read_image(path, background=BLACK)[0, 0, 0], torch.tensor([0.2, 0, 0]))
    torch.testing.assert_close(read_image(path, background=(0, 1, 0.5))[0, 0, 0], torch.tensor([0.2, 0.8, 0.4]))


def test_transparent_palette_entries_are_white(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    for suffix in ("png", "gif"):
        pixels = read_image(saved(image, tmp_path / f"a.{suffix}", transparency=0))
        assert pixels[0, 0].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    assert read_image(saved(image, tmp_path / "a.tif"))[0, 0, 0].tolist() == [1, 0, 0]
    jpeg = read_image(saved(image, tmp_path / "a.jpg", quality=100))  # whose inks are stored upside down
    torch.testing.assert_close(jpeg[0, 8, 8], torch.tensor([1.0, 0, 0]), atol=0.02, rtol=0)


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_16_bit_grey_keeps_its_precision(tmp_path: Path, name: str) -> None:
    image = Image.new("I;16", (3, 1))
    for x, value in enumerate((0, 13107, 65535)):
        image.putpixel((x, 0), value)
    path = saved(image, tmp_path / name)
    torch.testing.assert_close(read_image(path)[0, 0, :, 0], torch.tensor([0.0, 0.2, 1.0]))
    assert read_image(path).shape == (1, 1, 3, 3)
    torch.testing.assert_close(read_mask(path)[0, 0, :, 0], torch.tensor([0.0, 0.2, 1.0]))


def test_16_bits_with_alpha_or_colour(tmp_path: Path) -> None:
    levels = struct.pack(">4H", 0, 13107, 65535, 13107)
    files = {
        "rgb": png(1, 1, 16, 2, b"\0" + levels[:6]),
        "rgba": png(1, 1, 16, 6, b"\0" + levels),
        "grey and alpha": png(1, 1, 16, 4, b"\0" + levels[:4]),
        "transparent grey": png(2, 1, 16, 0, b"\0" + levels[:4], (b"tRNS", levels[:2])),
    }
    found = {}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        found[name] = read_image(str(tmp_path / name))[0, 0]
    near = {"atol": 1 / 255, "rtol": 0.0}  # colours are read with 8 bits
    torch.testing.assert_close(found["rgb"], torch.tensor([[0, 0.2, 1.0]]), **near)
    torch.testing.assert_close(found["rgba"], torch.tensor([[0.8, 0.84, 1.0]]), **near)
    torch.testing.assert_close(found["grey and alpha"], torch.tensor([[0.8, 0.8, 0.8]]), **near)
    torch.testing.assert_close(found["transparent grey"], torch.tensor([[1.0, 1, 1], [0.2, 0.2, 0.2]]))


def test_of_an_animation_the_first_frame_is_taken_and_told(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (2, 2), colour) for colour in ("red", "blue", "lime")]
    for suffix, options in (("gif", {}), ("webp", {"lossless": True}), ("png", {}), ("tif", {})):
        told: list[str] = []
        path = saved(frames[0], tmp_path / f"a.{suffix}", save_all=True, append_images=frames[1:], **options)
        assert read_image(path, notice=told.append)[0, 0, 0].tolist() == [1, 0, 0]
        assert len(told) == 1 and path in told[0] and "first" in told[0]
    told = []
    read_image(saved(frames[0], tmp_path / "still.png"), notice=told.append)
    assert told == []


def test_the_content_counts_and_not_the_suffix(tmp_path: Path) -> None:
    Image.new("RGB", (3, 2), "red").save(tmp_path / "x.txt", format="PNG")
    assert read_image(str(tmp_path / "x.txt")).shape == (1, 2, 3, 3)
    assert image_size(str(tmp_path / "x.txt")) == (3, 2)


# ---- masks ---------------------------------------------------------------------------------------


def test_a_soft_mask_stays_soft(tmp_path: Path) -> None:
    ramp = Image.frombytes("L", (256, 1), bytes(range(256)))
    for image in (ramp, ramp.convert("RGB")):
        mask = read_mask(saved(image, tmp_path / "ramp.png"))
        assert mask.shape == (1, 1, 256, 1)
        torch.testing.assert_close(mask.flatten(), torch.arange(256) / 255)


def test_a_mask_is_luminance_and_what_is_transparent_is_kept(tmp_path: Path) -> None:
    for mode, pixel, expected in (
        ("RGB", (255, 0, 0), 76 / 255),  # the weights of ITU-R 601, as in diffusers
        ("RGBA", (255, 255, 255, 51), 0.2),
        ("RGBA", (255, 255, 255, 0), 0.0),
        ("LA", (51, 255), 0.2),
        ("1", 1, 1.0),
    ):
        mask = read_mask(saved(Image.new(mode, (1, 1), pixel), tmp_path / "a.png"))  # type: ignore[arg-type]
        assert mask.item() == pytest.approx(expected), mode


# ---- what is refused -----------------------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for read in (read_image, read_mask, image_size):
        with pytest.raises(InputError, match=r"image '.*not here\.png' does not exist"):
            read(str(tmp_path / "not here.png"))  # type: ignore[operator]


def test_what_is_not_an_image_is_named(tmp_path: Path) -> None:
    text, cut = tmp_path / "text.png", tmp_path / "cut.png"
    text.write_text("no picture")
    whole = Path(saved(Image.effect_noise((64, 64), 50), tmp_path / "whole.png")).read_bytes()
    cut.write_bytes(whole[: len(whole) // 2])
    floats = Path(saved(Image.new("F", (1, 1)), tmp_path / "float.tif"))
    deep = Path(saved(Image.new("I", (1, 1), 70000), tmp_path / "deep.tif"))
    script = tmp_path / "script.eps"  # for which Pillow would start another program
    script.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n%%EndComments\n")
    for path in (text, cut, floats, deep, script, tmp_path):
        for read in (read_image, read_mask):
            with pytest.raises(InputError, match=f"image '.*{path.name}' cannot be read: "):
                read(str(path))


@pytest.mark.timeout(20)
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(InputError, match="it is not a file"):
        read_image(str(tmp_path / "pipe.png"))


def test_a_decompression_bomb_is_refused_from_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = tmp_path / "bomb.png"
    bomb.write_bytes(png(20000, 20000, 8, 0, b""))
    for limit in (Image.MAX_IMAGE_PIXELS, None):  # None: a program that switched Pillow's own check off
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        for read in (read_image, image_size):
            with pytest.raises(InputError, match=r"bomb\.png' cannot be read: it has more than \d+ pixels"):
                read(str(bomb))  # type: ignore[operator]


def test_a_large_photo_below_the_limit_passes_without_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "large.tif"
    path.write_bytes(png(12000, 9000, 1, 0, b""))  # header only: Pillow warns from 89 million pixels on
    with pytest.raises(InputError, match="cannot be read"):  # its rows are missing
        read_image(str(path))
    assert image_size(str(path)) == (12000, 9000)


def test_pillow_is_imported_only_when_a_file_is_read() -> None:
    code = (
        "import sys, kdit.nodes.io.read_image, kdit.nodes.io.save_image, kdit.nodes.io.save_video\n"
        "sys.exit(bool({'PIL', 'av'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
