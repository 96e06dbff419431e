"""Video files, read back with FFmpeg's and Pillow's decoders: colour, tags, rates, counts, settings."""

import json
import os
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Literal

import av
import pytest
import torch
from PIL import Image
from torch import Tensor

from kdit.config import FileOptions
from kdit.errors import OutputError
from kdit.media.metadata import read_settings
from kdit.media.video_writer import frame_durations, write_video

FILM = Fraction(24000, 1001)
PROMPT = "ein Füchslein 狐 🦊\nかわ"
TEXT = {"kdit": json.dumps({"prompt": PROMPT, "seed": 3}, ensure_ascii=False), "Software": "kdit 9"}
COLOURS = [(0, 0, 0), (255, 255, 255), (255, 0, 0), (0, 255, 0), (0, 0, 255), *((g, g, g) for g in range(0, 256, 17))]


def moving(count: int, width: int = 48, height: int = 32) -> Tensor:
    """A bar that goes a pixel to the right with each frame."""
    frames = torch.full((count, height, width, 3), 40, dtype=torch.uint8)
    for i in range(count):
        frames[i, :, i : i + 8] = 220
    return frames


def patches(count: int) -> Tensor:
    row = torch.tensor(COLOURS, dtype=torch.uint8).repeat_interleave(16, 0)
    return row.expand(count, 64, -1, -1)


@pytest.mark.parametrize(("pixel_format", "halved"), [(None, 2), ("yuv420p", 2), ("yuv444p", 1)])
def test_colours_are_converted_and_tagged(
    tmp_path: Path, pixel_format: Literal["yuv420p", "yuv444p"] | None, halved: int
) -> None:
    write_video(patches(3), tmp_path / "a.mp4", FILM, {}, options=FileOptions(pixel_format=pixel_format))
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        assert (context.name, context.pix_fmt) == ("h264", pixel_format or "yuv420p")
        tags = (context.color_range, context.colorspace, context.color_primaries, context.color_trc)
        assert tags == (1, 1, 1, 1)  # limited range; bt709 three times
        decoded = [
            [torch.frombuffer(bytearray(p), dtype=torch.uint8).view(p.height, -1) for p in frame.planes]
            for frame in container.decode(stream)
        ]
    assert len(decoded) == 3
    for planes in decoded:
        luma = planes[0][32, 8 : 16 * len(COLOURS) : 16].double()
        middle, step = 8 // halved, 16 // halved
        blue, red = (plane[32 // halved, middle : step * len(COLOURS) : step].double() - 128 for plane in planes[1:])
        y, pb, pr = (luma - 16) / 219, blue / 224, red / 224
        rgb = torch.stack([y + 1.5748 * pr, y - 0.1873 * pb - 0.4681 * pr, y + 1.8556 * pb], -1)  # BT.709
        furthest = (rgb.clamp(0, 1) * 255 - torch.tensor(COLOURS)).abs().max().item()
        assert furthest <= 3


@pytest.mark.parametrize("count", [1, 2, 4, 5, 15, 33])
@pytest.mark.parametrize("fps", [FILM, Fraction(25, 2), Fraction(1), Fraction(60), Fraction(1, 3)], ids=str)
def test_frame_count_rate_and_duration(tmp_path: Path, count: int, fps: Fraction) -> None:
    frames = moving(count)
    write_video(frames, tmp_path / "a.mp4", fps, TEXT)
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, stream.frames) == (48, 32, count)
        assert stream.average_rate == fps
        assert stream.duration is not None and stream.time_base is not None
        assert stream.duration * stream.time_base == count / fps
        assert container.duration is not None
        assert container.duration / 1e6 == pytest.approx(float(count / fps), abs=1e-6)
        decoded = list(container.decode(stream))
    assert [frame.pts * frame.time_base for frame in decoded] == [i / fps for i in range(count)]
    for i, frame in enumerate(decoded):  # in order
        grey = torch.from_numpy(frame.to_ndarray(format="gray")[16].copy()).float()
        assert grey[i : i + 8].mean() > 180 and grey[i + 10 :].mean() < 80


@pytest.mark.skipif(shutil.which("ffprobe") is None, reason="needs ffprobe")
def test_ffprobe_agrees(tmp_path: Path) -> None:
    write_video(moving(5), tmp_path / "a.mp4", FILM, {})
    asked = ["ffprobe", "-v", "error", "-count_frames", "-show_streams", "-of", "json", str(tmp_path / "a.mp4")]
    (stream,) = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)["streams"]
    assert (stream["width"], stream["height"], stream["nb_read_frames"]) == (48, 32, "5")
    assert (stream["r_frame_rate"], stream["pix_fmt"], stream["color_range"]) == ("24000/1001", "yuv420p", "tv")
    assert {stream[f"color_{name}"] for name in ("space", "transfer", "primaries")} == {"bt709"}


def test_the_index_comes_before_the_frames(tmp_path: Path) -> None:
    write_video(moving(5), tmp_path / "a.mp4", FILM, {})
    data = (tmp_path / "a.mp4").read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat")


@pytest.mark.parametrize("suffix", [".mp4", ".gif", ".webp", ".MP4"])
def test_settings_come_back(tmp_path: Path, suffix: str) -> None:
    write_video(moving(4), tmp_path / f"a{suffix}", FILM, TEXT)
    assert read_settings(tmp_path / f"a{suffix}") == {"prompt": PROMPT, "seed": 3}
    assert os.listdir(tmp_path) == [f"a{suffix}"]


def test_a_video_without_settings_is_one_too(tmp_path: Path) -> None:
    for suffix in (".mp4", ".gif", ".webp"):
        write_video(moving(2), tmp_path / f"a{suffix}", FILM, {})
        assert (tmp_path / f"a{suffix}").stat().st_size > 0


@pytest.mark.parametrize(("suffix", "tolerance", "unit"), [(".gif", 12, 10), (".webp", 12, 1)])
@pytest.mark.parametrize("fps", [FILM, Fraction(25, 2), Fraction(1), Fraction(30)], ids=str)
def test_animations(tmp_path: Path, suffix: str, tolerance: int, unit: int, fps: Fraction) -> None:
    frames = moving(7, 49, 31)  # odd sides are no matter here
    write_video(frames, tmp_path / f"a{suffix}", fps, TEXT)
    ends, end = [], 0
    with Image.open(tmp_path / f"a{suffix}") as image:
        assert (image.size, image.n_frames, image.info["loop"]) == ((49, 31), 7, 0)  # type: ignore[attr-defined]
        for i in range(7):
            image.seek(i)
            pixels = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8).view(31, 49, 3)
            assert (pixels[16].int() - frames[i, 16].int()).abs().float().mean() <= tolerance
            end += image.info["duration"]
            ends.append(end)
    assert ends == pytest.approx([float(1000 * (i + 1) / fps) for i in range(7)], abs=unit / 2 + 1e-6)


def test_durations_do_not_drift() -> None:
    durations = frame_durations(1000, FILM, 100)
    assert set(durations) == {4, 5} and sum(durations) == round(1000 * 100 / FILM)


def test_an_odd_side_is_refused_for_mp4_with_what_fits(tmp_path: Path) -> None:
    for width, height in ((641, 480), (640, 479), (641, 479)):
        told = rf"even .* got {width}x{height}; make it (642|640)x480, choose `pixel_format` yuv444p, or write a \.gif"
        with pytest.raises(OutputError, match=told):
            write_video(torch.zeros(1, height, width, 3, dtype=torch.uint8), tmp_path / "a.mp4", FILM, {})
    assert os.listdir(tmp_path) == []


def test_odd_sides_can_have_colour_for_each_pixel(tmp_path: Path) -> None:
    write_video(moving(2, 41, 31), tmp_path / "a.mp4", FILM, TEXT, options=FileOptions(pixel_format="yuv444p"))
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, stream.frames) == (41, 31, 2)
        assert stream.codec_context.pix_fmt == "yuv444p" and not container.streams.audio
        grey = next(container.decode(stream)).to_ndarray(format="gray")
    assert grey[16, :7].mean() > 180 and grey[16, 10:].mean() < 80


def test_options_are_honoured_or_refused(tmp_path: Path) -> None:
    noise = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for suffix, name, values in ((".mp4", "crf", (0, 17, 40)), (".webp", "quality", (100, 60, 10))):
        sizes = []
        for value in values:
            options = FileOptions(**{name: value})  # type: ignore[arg-type]
            write_video(noise, tmp_path / f"a{suffix}", FILM, {}, options=options)
            sizes.append((tmp_path / f"a{suffix}").stat().st_size)
        assert sizes == sorted(set(sizes), reverse=True)
    for name, options, told in (
        ("b.gif", FileOptions(crf=20), "`crf` is for .mp4 files"),
        ("b.mp4", FileOptions(quality=20), "`quality` is for .jpg, .jpeg, .webp files"),
        ("b.webp", FileOptions(pixel_format="yuv420p"), "`pixel_format` is for .mp4 files"),
        ("b.avi", FileOptions(), "a video's name ends in .mp4 or .gif or .webp"),
    ):
        with pytest.raises(OutputError) as refused:
            write_video(noise, tmp_path / name, FILM, {}, options=options)
        assert told in str(refused.value)
    assert sorted(os.listdir(tmp_path)) == ["a.mp4", "a.webp"]


def test_rates_that_no_file_can_state_are_refused(tmp_path: Path) -> None:
    for name, fps, told in (
        ("a.gif", Fraction(60), "at most 50 frames per second, got 60"),
        ("a.mp4", Fraction(0), "above 0"),
        ("a.mp4", Fraction(1, 10**9), "above 0"),
    ):
        with pytest.raises(OutputError, match=told):
            write_video(moving(2), tmp_path / name, fps, {})
    write_video(moving(2), tmp_path / "b.mp4", Fraction(23976023976, 10**9), {})  # numbers of more than 32 bits
    with av.open(str(tmp_path / "b.mp4")) as container:
        assert float(container.streams.video[0].average_rate or 0) == pytest.approx(23.976023976, rel=1e-6)
    assert os.listdir(tmp_path) == ["b.mp4"]


def test_an_encoder_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(b"old")

    def fail(*_: object, **__: object) -> object:
        raise av.error.ExternalError(1, "encoder fell over")

    monkeypatch.setattr(av, "open", fail)
    with pytest.raises(OutputError, match=r"cannot write '.*a\.mp4': encoder fell over"):
        write_video(moving(2), path, FILM, {})
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a.mp4"]
