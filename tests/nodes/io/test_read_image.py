"""READ_IMAGE: batches, lists, masks, notices. What files hold is tested in tests/media."""

from pathlib import Path

import pytest
from PIL import Image
from torch import Tensor

from kdit.engine.engine import Engine
from kdit.errors import InputError
from kdit.keys import MAIN, IONodeType, TensorKey
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.node_def import NodeDef


def saved(image: Image.Image, path: Path, **options: object) -> str:
    image.save(path, **options)  # type: ignore[arg-type]
    return str(path)


def read_node(*paths: object, **metadata: object) -> Tensor | list[Tensor]:
    engine = Engine.single("cpu")
    context = NodeContext(metadata={"img_paths": list(paths), **metadata})
    engine.run_node(NodeDef(IONodeType.READ_IMAGE), {}, context)
    return engine.get_tensor(TensorKey.IMAGE)


def test_files_of_one_size_come_as_one_batch(tmp_path: Path) -> None:
    paths = [saved(Image.new("RGB", (3, 2), color), tmp_path / f"{color}.png") for color in ("red", "blue")]
    pixels = read_node(*paths)
    assert isinstance(pixels, Tensor)
    assert pixels.shape == (2, 2, 3, 3)
    assert pixels[0, 1, 2].tolist() == [1, 0, 0]
    assert pixels[1, 0, 0].tolist() == [0, 0, 1]


def test_files_of_different_sizes_come_as_a_list(tmp_path: Path) -> None:
    paths = [saved(Image.new("RGB", size), tmp_path / f"{size[0]}.png") for size in ((3, 2), (2, 3))]
    pixels = read_node(*paths)
    assert isinstance(pixels, list)
    assert [tuple(item.shape) for item in pixels] == [(1, 2, 3, 3), (1, 3, 2, 3)]


def test_a_mask_has_one_channel_and_what_is_transparent_is_kept(tmp_path: Path) -> None:
    path = saved(Image.new("LA", (3, 2), (255, 51)), tmp_path / "mask.png")
    mask = read_node(path, kind="mask")
    assert isinstance(mask, Tensor)
    assert mask.shape == (1, 2, 3, 1) and mask.mean().item() == pytest.approx(0.2)
    picture = read_node(path, kind="image")
    assert isinstance(picture, Tensor) and picture.mean().item() == 1  # white over white


def test_the_frames_that_are_left_out_are_told(tmp_path: Path) -> None:
    path = saved(
        Image.new("RGB", (2, 2)), tmp_path / "a.gif", save_all=True, append_images=[Image.new("RGB", (2, 2), "red")]
    )
    engine = Engine.single("cpu")
    engine.run_node(NodeDef(IONodeType.READ_IMAGE), {}, NodeContext(metadata={"img_paths": [path]}))
    (notice,) = engine.notices(MAIN)
    assert "the first one is taken" in notice


@pytest.mark.parametrize("paths", [[], [3], ["a.png", None]])
def test_img_paths_must_be_paths(paths: list[object]) -> None:
    with pytest.raises(InputError, match="img_paths must be a list of at least one path"):
        read_node(*paths)


def test_a_single_string_is_not_taken_for_a_list_of_letters() -> None:
    with pytest.raises(InputError, match="img_paths must be a list"):
        Engine.single("cpu").run_node(NodeDef(IONodeType.READ_IMAGE), {}, NodeContext(metadata={"img_paths": "a.png"}))


def test_kinds_and_missing_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match='kind must be "image" or "mask", got \'masks\''):
        read_node("a.png", kind="masks")
    with pytest.raises(InputError, match=r"image '.*not here\.png' does not exist"):
        read_node(str(tmp_path / "not here.png"))
