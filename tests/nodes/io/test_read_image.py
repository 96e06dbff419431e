import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from kdit.engine.engine import Engine
from kdit.errors import InputError
from kdit.keys import IONodeType, TensorKey
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.io.read_image import read_image


def saved(image: Image.Image, path: Path, **options: object) -> str:
    image.save(path, **options)  # type: ignore[arg-type]
    return str(path)


def read_node(*paths: object) -> Tensor | list[Tensor]:
    engine = Engine.single("cpu")
    engine.run_node(NodeDef(IONodeType.READ_IMAGE), {}, NodeContext(metadata={"img_paths": list(paths)}))
    return engine.get_tensor(TensorKey.IMAGE)


def test_files_of_one_size_come_as_one_batch(tmp_path: Path) -> None:
    paths = [saved(Image.new("RGB", (3, 2), color), tmp_path / f"{color}.png") for color in ("red", "blue")]
    pixels = read_node(*paths)
    assert isinstance(pixels, Tensor)
    assert pixels.shape == (2, 2, 3, 3)
    assert pixels.dtype is torch.float32
    assert pixels[0, 1, 2].tolist() == [1, 0, 0]
    assert pixels[1, 0, 0].tolist() == [0, 0, 1]


def test_files_of_different_sizes_come_as_a_list(tmp_path: Path) -> None:
    paths = [saved(Image.new("RGB", size), tmp_path / f"{size[0]}.png") for size in ((3, 2), (2, 3))]
    pixels = read_node(*paths)
    assert isinstance(pixels, list)
    assert [tuple(item.shape) for item in pixels] == [(1, 2, 3, 3), (1, 3, 2, 3)]


def test_bytes_become_fractions(tmp_path: Path) -> None:
    image = Image.new("RGB", (2, 1))
    image.putpixel((1, 0), (51, 102, 255))
    pixels = read_image(saved(image, tmp_path / "a.png"))
    torch.testing.assert_close(pixels, torch.tensor([[[[0, 0, 0], [0.2, 0.4, 1.0]]]]))


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    image = Image.new("RGB", (16, 8), "black")
    image.paste("white", (0, 0, 8, 8))  # white left half
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise: left becomes top
    pixels = read_image(saved(image, tmp_path / "a.jpg", exif=exif, quality=100))
    assert pixels.shape == (1, 16, 8, 3)
    assert pixels[0, 1, 4].min() > 0.9
    assert pixels[0, 14, 4].max() < 0.1


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


def test_transparent_palette_entries_are_white(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    pixels = read_image(saved(image, tmp_path / "a.png", transparency=0))
    assert pixels[0, 0].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    pixels = read_image(saved(Image.new("CMYK", (1, 1), (0, 255, 255, 0)), tmp_path / "a.tif"))
    assert pixels[0, 0, 0].tolist() == [1, 0, 0]


def test_16_bit_grey_keeps_its_precision(tmp_path: Path) -> None:
    image = Image.new("I;16", (3, 1))
    for x, value in enumerate((0, 13107, 65535)):
        image.putpixel((x, 0), value)
    pixels = read_image(saved(image, tmp_path / "a.png"))
    torch.testing.assert_close(pixels[0, 0, :, 0], torch.tensor([0.0, 0.2, 1.0]))
    assert pixels.shape == (1, 1, 3, 3)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "not here.png")
    with pytest.raises(InputError, match=r"image '.*not here\.png' does not exist"):
        read_node(path)


def test_what_is_not_an_image_is_named(tmp_path: Path) -> None:
    text, cut, floats = tmp_path / "text.png", tmp_path / "cut.png", tmp_path / "float.tif"
    text.write_text("no picture")
    whole = Path(saved(Image.effect_noise((64, 64), 50), tmp_path / "whole.png")).read_bytes()
    cut.write_bytes(whole[: len(whole) // 2])
    Image.new("F", (1, 1)).save(floats)
    for path in (text, cut, floats, tmp_path):
        with pytest.raises(InputError, match=f"image '.*{path.name}' cannot be read: "):
            read_image(str(path))


@pytest.mark.parametrize("paths", [[], [3], ["a.png", None]])
def test_img_paths_must_be_paths(paths: list[object]) -> None:
    with pytest.raises(InputError, match="img_paths must be a list of at least one path"):
        read_node(*paths)


def test_a_single_string_is_not_taken_for_a_list_of_letters() -> None:
    with pytest.raises(InputError, match="img_paths must be a list"):
        Engine.single("cpu").run_node(NodeDef(IONodeType.READ_IMAGE), {}, NodeContext(metadata={"img_paths": "a.png"}))


def test_pillow_is_imported_only_when_a_file_is_read() -> None:
    code = "import sys, kdit.nodes.io.read_image, kdit.nodes.io.save_image; sys.exit('PIL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
