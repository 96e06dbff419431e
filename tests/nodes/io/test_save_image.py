"""SAVE_IMAGE: one sound file per image, or none. What files hold is tested in tests/media."""

import os
from pathlib import Path

import pytest
import torch
from PIL import Image, PngImagePlugin
from torch import Tensor

from kdit.config import FileOptions
from kdit.engine.engine import Engine
from kdit.errors import ConfigError, InputError, NonFiniteError, OutputError
from kdit.keys import IONodeType, TensorKey
from kdit.media.levels import to_uint8
from kdit.media.metadata import read_settings
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.node_def import NodeDef
from kdit.tensor.tensor_pool_key import TensorPoolKey

SOURCE = TensorPoolKey(500, TensorKey.IMAGE)


def save_node(data: Tensor | list[Tensor], **metadata: object) -> None:
    engine = Engine.single("cpu")
    engine.put_tensors({SOURCE: data})
    engine.run_node(NodeDef(IONodeType.SAVE_IMAGE), {TensorKey.IMAGE: SOURCE}, NodeContext(metadata=metadata))


def test_a_batch_goes_to_one_file_each_with_its_text(tmp_path: Path) -> None:
    paths = [str(tmp_path / "a.png"), str(tmp_path / "b.PNG")]
    pixels = torch.stack([torch.zeros(2, 3, 3), torch.ones(2, 3, 3)])
    texts = [{"kdit": '{"seed": 0}', "prompt": "ein Füchslein 狐 🦊"}, {"kdit": '{"seed": 1}'}]
    save_node(pixels, paths=paths, text=texts)
    for path, value, text in zip(paths, (0, 255), texts, strict=True):
        with Image.open(path) as image:
            assert (image.format, image.mode, image.size) == ("PNG", "RGB", (3, 2))
            assert image.getpixel((2, 1)) == (value, value, value)
            assert isinstance(image, PngImagePlugin.PngImageFile)
            assert image.text == text
    assert sorted(os.listdir(tmp_path)) == ["a.png", "b.PNG"]


def test_the_suffix_chooses_the_format(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.png", "a.jpg", "a.webp")]
    save_node(torch.zeros(3, 8, 8, 3), paths=paths, text=[{"kdit": f'{{"seed": {i}}}'} for i in range(3)])
    found = []
    for path in paths:
        with Image.open(path) as image:
            found.append(image.format)
    assert found == ["PNG", "JPEG", "WEBP"]
    assert [read_settings(path)["seed"] for path in paths] == [0, 1, 2]


def test_a_list_of_sizes_and_no_text(tmp_path: Path) -> None:
    paths = [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    save_node([torch.zeros(1, 2, 3, 3), torch.zeros(1, 4, 5, 3)], paths=paths)
    sizes = []
    for path in paths:
        with Image.open(path) as image:
            sizes.append(image.size)
    assert sizes == [(3, 2), (5, 4)]


def test_pixels_are_clamped_and_rounded() -> None:
    pixels = torch.tensor([-0.5, 0.0, 0.4 / 255, 0.6 / 255, 127.4 / 255, 254.6 / 255, 1.0, 7.0])
    assert to_uint8(pixels).tolist() == [0, 0, 0, 1, 127, 255, 255, 255]
    assert to_uint8(torch.tensor([0.5], dtype=torch.bfloat16)).tolist() == [128]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_no_file_is_written_if_one_image_is_not_finite(tmp_path: Path, bad: float) -> None:
    pixels = torch.zeros(2, 2, 2, 3)
    pixels[1, 0, 0, 0] = bad
    with pytest.raises(NonFiniteError, match="1 of 12 values are NaN or infinite"):
        save_node(pixels, paths=[str(tmp_path / "a.png"), str(tmp_path / "b.png")])
    assert os.listdir(tmp_path) == []


def test_numbers_of_images_paths_and_texts_must_agree(tmp_path: Path) -> None:
    paths = [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    with pytest.raises(InputError, match="1 images but 2 paths"):
        save_node(torch.zeros(1, 2, 2, 3), paths=paths)
    with pytest.raises(InputError, match="2 paths but text for 1 images"):
        save_node(torch.zeros(2, 2, 2, 3), paths=paths, text=[{}])
    with pytest.raises(InputError, match="each image needs a path of its own"):
        save_node(torch.zeros(2, 2, 2, 3), paths=paths[:1] * 2)
    with pytest.raises(ConfigError, match="unknown metadata 'path'"):
        save_node(torch.zeros(1, 2, 2, 3), path=paths[:1])
    with pytest.raises(InputError, match="nothing is connected to IMAGE"):
        context = NodeContext(metadata={"paths": paths})
        Engine.single("cpu").run_node(NodeDef(IONodeType.SAVE_IMAGE), {}, context)
    assert os.listdir(tmp_path) == []


def test_every_path_and_option_is_checked_before_the_first_is_written(tmp_path: Path) -> None:
    first = str(tmp_path / "a.png")
    for second, options, told in (
        (tmp_path / "missing" / "b.png", {}, "does not exist"),
        (tmp_path / "b.mp4", {}, "must end in"),
        (tmp_path / "b.jpg", {"options": FileOptions(quality=50)}, r"`quality` is for \.jpg"),
    ):
        with pytest.raises(OutputError, match=told):
            save_node(torch.zeros(2, 2, 2, 3), paths=[first, str(second)], **options)
    assert os.listdir(tmp_path) == []


def test_quality_reaches_the_file(tmp_path: Path) -> None:
    noise = torch.rand(1, 32, 32, 3, generator=torch.Generator().manual_seed(0))
    sizes = []
    for quality in (95, 10):
        save_node(noise, paths=[str(tmp_path / "a.jpg")], options=FileOptions(quality=quality))
        sizes.append((tmp_path / "a.jpg").stat().st_size)
    assert sizes[0] > 2 * sizes[1]
