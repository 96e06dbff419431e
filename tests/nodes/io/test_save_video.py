"""SAVE_VIDEO: one sound file per video, or none. What files hold is tested in tests/media."""

import os
from fractions import Fraction
from pathlib import Path

import av
import pytest
import torch
from PIL import Image
from torch import Tensor

from kdit.config import FileOptions
from kdit.engine.engine import Engine
from kdit.errors import ConfigError, InputError, NonFiniteError, OutputError
from kdit.keys import IONodeType, TensorKey
from kdit.media.metadata import read_settings
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.node_def import NodeDef
from kdit.tensor.tensor_pool_key import TensorPoolKey

SOURCE = TensorPoolKey(500, TensorKey.VIDEO)


def save_node(data: Tensor | list[Tensor], fps: object = "24000/1001", **metadata: object) -> None:
    engine = Engine.single("cpu")
    engine.put_tensors({SOURCE: data})
    context = NodeContext(metadata={"fps": fps, **metadata})
    engine.run_node(NodeDef(IONodeType.SAVE_VIDEO), {TensorKey.VIDEO: SOURCE}, context)


def test_a_batch_goes_to_one_file_each_with_its_text(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.mp4", "b.mp4")]
    videos = torch.stack([torch.zeros(5, 16, 32, 3), torch.ones(5, 16, 32, 3)])
    save_node(videos, paths=paths, text=[{"kdit": '{"seed": 0}'}, {"kdit": '{"seed": 1}'}])
    for i, path in enumerate(paths):
        assert read_settings(path) == {"seed": i}
        with av.open(path) as container:
            stream = container.streams.video[0]
            assert (stream.width, stream.height, stream.frames) == (32, 16, 5)
            assert stream.average_rate == Fraction(24000, 1001)
            frame = next(container.decode(stream)).to_ndarray(format="gray")
            assert frame.mean() == pytest.approx(255 * i, abs=3)
    assert sorted(os.listdir(tmp_path)) == ["a.mp4", "b.mp4"]


def test_the_suffix_chooses_the_format(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.gif", "a.webp")]
    videos = torch.rand(2, 3, 15, 17, 3, generator=torch.Generator().manual_seed(0))
    save_node(videos, 12.5, paths=paths)
    for path in paths:
        with Image.open(path) as image:
            assert (image.size, image.n_frames) == ((17, 15), 3)  # type: ignore[attr-defined]
            image.seek(1)
            image.load()
            assert image.info["duration"] == 80


def test_one_frame_may_be_a_picture(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.png", "a.jpg", "a.webp", "a.mp4", "a.gif")]
    save_node(torch.full((5, 1, 16, 16, 3), 0.2), paths=paths, text=[{"kdit": f'{{"seed": {i}}}'} for i in range(5)])
    assert [read_settings(path)["seed"] for path in paths] == [0, 1, 2, 3, 4]
    for path in paths[:3]:
        with Image.open(path) as image:
            assert image.getpixel((8, 8)) == (51, 51, 51)
    with pytest.raises(OutputError, match=r"must end in \.mp4"):
        save_node(torch.zeros(1, 2, 16, 16, 3), paths=paths[:1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_file_is_written_if_one_video_is_not_finite(tmp_path: Path, bad: float) -> None:
    videos = torch.zeros(2, 2, 16, 16, 3)
    videos[1, 1, 0, 0, 0] = bad
    with pytest.raises(NonFiniteError, match="decoded video: 1 of 1536 values are NaN or infinite"):
        save_node(videos, paths=[str(tmp_path / "a.mp4"), str(tmp_path / "b.mp4")])
    assert os.listdir(tmp_path) == []


def test_mistakes_are_told_before_the_first_file(tmp_path: Path) -> None:
    first, video = str(tmp_path / "a.mp4"), torch.zeros(2, 2, 16, 16, 3)
    refused: list[tuple[Tensor | list[Tensor], str, dict[str, object], type[Exception], str]] = [
        (video, "missing/b.mp4", {}, OutputError, "does not exist"),
        (video, "b.avi", {}, OutputError, "must end in"),
        (video, "b.gif", {"options": FileOptions(crf=20)}, OutputError, "`crf` is for .mp4"),
        (video, "b.gif", {"fps": 60}, OutputError, "at most 50 frames per second"),
        (video, "b.mp4", {"fps": 0}, ConfigError, "`fps` must be above 0"),
        (video, "b.mp4", {"fps": "fast"}, ConfigError, "`fps` must be a number"),
        (video[:1], "b.mp4", {}, InputError, "1 videos but 2 paths"),
        (video, "a.mp4", {}, InputError, "a path of its own"),
        (video, "b.mp4", {"text": [{}]}, InputError, "2 paths but text for 1 videos"),
        ([video[:1], torch.zeros(1, 2, 15, 16, 3)], "b.mp4", {}, OutputError, "make it 16x16"),
    ]
    for data, second, options, kind, told in refused:
        with pytest.raises(kind) as caught:
            save_node(data, paths=[first, str(tmp_path / second)], **options)
        assert told in str(caught.value)
    with pytest.raises(InputError, match="nothing is connected to VIDEO"):
        context = NodeContext(metadata={"paths": [first], "fps": 8})
        Engine.single("cpu").run_node(NodeDef(IONodeType.SAVE_VIDEO), {}, context)
    assert os.listdir(tmp_path) == []


def test_crf_reaches_the_file(tmp_path: Path) -> None:
    noise = torch.rand(1, 2, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    sizes = []
    for crf in (0, 40):
        save_node(noise, paths=[str(tmp_path / "a.mp4")], options=FileOptions(crf=crf))
        sizes.append((tmp_path / "a.mp4").stat().st_size)
    assert sizes[0] > 2 * sizes[1]
