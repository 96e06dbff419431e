"""What can become which file, told before any work."""

import builtins
from fractions import Fraction
from pathlib import Path

import av
import pytest
from PIL import features

from kdit.errors import OutputError
from kdit.media.formats import OutputKind, check_output


@pytest.mark.parametrize(
    ("kind", "fitting", "others"),
    [
        ("image", [".png", ".jpg", ".jpeg", ".webp", ".JPG"], [".mp4", ".gif", ".safetensors", ".tif", ".mov", ""]),
        ("video", [".mp4", ".gif", ".webp", ".Mp4"], [".png", ".jpg", ".safetensors", ".avi", ".wav", ""]),
        ("latents", [".safetensors"], [".png", ".mp4", ".pt", ".bin", ""]),
    ],
)
def test_suffixes(kind: OutputKind, fitting: list[str], others: list[str], tmp_path: Path) -> None:
    for suffix in fitting:
        check_output(tmp_path / f"a{suffix}", kind)
    for suffix in others:
        with pytest.raises(OutputError) as refused:
            check_output(tmp_path / f"a{suffix}", kind)
        assert fitting[0] in str(refused.value) and f"a{suffix}" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_video_of_one_frame_is_a_picture_too(tmp_path: Path) -> None:
    for suffix in (".mp4", ".gif", ".png", ".jpg", ".webp"):
        check_output(tmp_path / f"a{suffix}", "video", num_frames=1)
    with pytest.raises(OutputError, match=r"must end in \.mp4"):
        check_output(tmp_path / "a.png", "video", num_frames=2)


def test_sizes_and_rates(tmp_path: Path) -> None:
    for name, kind, size, fps, told in (
        ("a.mp4", "video", (641, 479), None, "make it 642x480"),
        ("a.webp", "video", (16384, 16), None, "at most 16383 pixels"),
        ("a.jpg", "image", (16, 70000), None, "at most 65500 pixels"),
        ("a.gif", "video", (16, 16), Fraction(101, 2), "at most 50 frames per second"),
    ):
        with pytest.raises(OutputError, match=told):
            check_output(tmp_path / name, kind, size=size, fps=fps)  # type: ignore[arg-type]
    check_output(tmp_path / "a.gif", "video", size=(641, 479), num_frames=5, fps=Fraction(50))
    check_output(tmp_path / "a.png", "image", size=(641, 479))


def test_a_missing_encoder_is_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(av, "codecs_available", {"mpeg4"})
        with pytest.raises(OutputError, match=r"no libx264; write a \.gif or \.webp"):
            check_output(tmp_path / "a.mp4", "video")
        check_output(tmp_path / "a.gif", "video")
    with monkeypatch.context() as patch:
        patch.setattr(features, "check", lambda name: name != "webp")
        with pytest.raises(OutputError, match="no WebP encoder"):
            check_output(tmp_path / "a.webp", "image")
    real = builtins.__import__

    def without_av(name: str, *args: object, **options: object) -> object:
        if name == "av":
            raise ImportError("No module named 'av'")
        return real(name, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_av)
    with pytest.raises(OutputError, match=r"PyAV is not installed \(pip install av\)"):
        check_output(tmp_path / "a.mp4", "video")


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="missing' does not exist"):
        check_output(tmp_path / "missing" / "a.mp4", "video")
