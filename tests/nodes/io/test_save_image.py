import os
from pathlib import Path

import pytest
import torch
from PIL import Image, PngImagePlugin
from torch import Tensor

from kdit.engine.engine import Engine
from kdit.errors import ConfigError, InputError, NonFiniteError, OutputError
from kdit.keys import IONodeType, TensorKey
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.io.save_image import to_uint8, write_png
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


def test_every_path_is_checked_before_the_first_is_written(tmp_path: Path) -> None:
    paths = [str(tmp_path / "a.png"), str(tmp_path / "missing" / "b.png")]
    with pytest.raises(OutputError, match="does not exist"):
        save_node(torch.zeros(2, 2, 2, 3), paths=paths)
    assert os.listdir(tmp_path) == []


def test_a_broken_write_keeps_the_old_file_and_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.png"
    target.write_bytes(b"old")

    def full_disk(self: Image.Image, file: object, **options: object) -> None:
        file.write(b"half a picture")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full_disk)
    with pytest.raises(OutputError, match=r"cannot write '.*a\.png': No space left on device"):
        write_png(torch.zeros(2, 2, 3, dtype=torch.uint8), str(target), {})
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.png"]


def test_an_interrupted_write_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Image.Image, file: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_png(torch.zeros(2, 2, 3, dtype=torch.uint8), str(tmp_path / "a.png"), {})
    assert os.listdir(tmp_path) == []


def test_an_existing_file_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "a.png"
    for value in (0, 255):
        write_png(torch.full((2, 2, 3), value, dtype=torch.uint8), str(target), {})
    with Image.open(target) as image:
        assert image.getpixel((0, 0)) == (255, 255, 255)
