"""How files of a request are encoded: reaches the file, its settings and its remake, or is refused before loading."""

import builtins
import json
import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from kdit import FileOptions, Pipeline, RuntimeConfig
from kdit.cli.main import app
from kdit.errors import InputError, OutputError
from kdit.media.metadata import read_settings

RUN = CliRunner()
ReferenceFamily = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: object) -> Result:
    return RUN.invoke(app, ["generate", *map(str, arguments), "--device", "cpu"])


def generate(*arguments: object) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights may be loaded."""

    def never(_: Pipeline, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(Pipeline, "load_models", never)


def test_quality_reaches_the_file_its_settings_and_its_remake() -> None:
    for quality in (95, 10):
        generate(
            "red heart", "--size", "64x64", "--steps", "1", "--seed", "3", "--quality", quality, "-o", f"{quality}.jpg"
        )
    assert Path("95.jpg").stat().st_size > 1.5 * Path("10.jpg").stat().st_size
    assert read_settings("10.jpg")["file_options"] == {"quality": 10}
    generate("--from", "10.jpg", "-o", "again.jpg")
    assert Path("again.jpg").read_bytes() == Path("10.jpg").read_bytes()
    generate("--from", "10.jpg", "--quality", "95", "-o", "better.jpg")
    assert read_settings("better.jpg")["file_options"] == {"quality": 95}
    generate("--from", "10.jpg", "-o", "other.webp")  # another format: lossless, as ever
    assert read_settings("other.webp")["file_options"] == {}
    generate("--from", "10.jpg", "-o", "plain.png")
    with Image.open("other.webp") as webp, Image.open("plain.png") as png:
        assert webp.tobytes() == png.tobytes()


def test_options_of_a_video_reach_the_file_and_its_remake(reference_family: ReferenceFamily) -> None:
    model = reference_family("wan21_t2v") / "model"
    request = ["a boat", "--model", model, "--size", "33x31", "--frames", "5", "--fit", "crop", "--steps", "1"]
    encoding = ["--crf", "40", "--pixel-format", "yuv444p"]
    told = json.loads(generate(*request, "--seed", "1", *encoding, "-o", "a.mp4", "--json").stdout)["settings"]
    assert told["file_options"] == {"crf": 40, "pixel_format": "yuv444p"} and told["size"] == [33, 31]
    generate("--from", "a.mp4")  # kdit.mp4
    assert Path("kdit.mp4").read_bytes() == Path("a.mp4").read_bytes()
    generate("--from", "a.mp4", "--crf", "0", "-o", "b.mp4")
    assert Path("b.mp4").stat().st_size > Path("a.mp4").stat().st_size
    with av.open("a.mp4") as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, stream.frames) == (33, 31, 5)  # as stated; odd sides need yuv444p
        assert stream.codec_context.pix_fmt == "yuv444p"
        assert list(container.streams) == [stream]  # no sound was made, so there is no track
    generate("--from", "a.mp4", "-o", "c.gif")
    assert read_settings("c.gif")["file_options"] == {}
    refused = run(*request, "-o", "d.mp4")
    assert refused.exit_code == 2 and "make it 34x32, choose --pixel-format yuv444p" in refused.stderr


@pytest.mark.parametrize(("fps", "rate"), [("23.976", "24000/1001"), ("12.5", "25/2"), ("1", "1")])
def test_a_rate_is_exact_in_the_file_and_its_settings(reference_family: ReferenceFamily, fps: str, rate: str) -> None:
    model = reference_family("wan21_t2v") / "model"
    request = ["a", "--model", model, "--size", "32x32", "--steps", "1", "--fps", fps]
    for frames in (1, 5):
        generate(*request, "--frames", frames, "-o", "a.mp4")
        assert read_settings("a.mp4")["fps"] == rate
        with av.open("a.mp4") as container:
            stream = container.streams.video[0]
            assert (stream.frames, stream.average_rate) == (frames, Fraction(rate))
            assert stream.duration is not None and stream.time_base is not None
            assert stream.duration * stream.time_base == frames / Fraction(rate)


@pytest.mark.usefixtures("unloaded")
def test_a_missing_encoder_is_told_before_loading(
    reference_family: ReferenceFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ["a", "--model", reference_family("wan21_t2v") / "model"]
    for output in (["-o", "a.mp4"], []):  # a video is an MP4 if nothing else is said
        with monkeypatch.context() as patch:
            patch.setattr(av, "codecs_available", {"mpeg4"})
            result = run(*request, *output)
        assert result.exit_code == 2 and "no libx264" in result.stderr, result.output
    real = builtins.__import__

    def without_av(name: str, *args: object, **options: object) -> object:
        if name == "av":
            raise ImportError("No module named 'av'")
        return real(name, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_av)
    result = run(*request, "-o", "a.mp4")
    assert result.exit_code == 2 and "PyAV is not installed (pip install av)" in result.stderr, result.output


@pytest.mark.usefixtures("unloaded")
def test_settings_too_long_for_a_jpeg_are_told_before_loading() -> None:
    noise = os.urandom(80_000).hex()
    result = run(noise, "-o", "a.jpg")
    assert result.exit_code == 2 and "have no room in a JPEG; use .png or .webp" in result.stderr
    assert os.listdir() == []


def test_python_checks_how_files_are_encoded_before_loading(reference_family: ReferenceFamily) -> None:
    pipe = Pipeline.open(reference_family("flux_dev") / "model")

    def request(options: FileOptions, *paths: str, prompt: str = "a") -> None:
        config = RuntimeConfig(size=(32, 32), file_options=options, save_paths=paths or None)
        pipe.request(prompt, runtime_config=config)

    request(FileOptions(quality=50), "a.webp")
    with pytest.raises(OutputError, match=r"'a\.png': `quality` is for \.jpg"):
        request(FileOptions(quality=50), "a.png")
    with pytest.raises(OutputError, match=r"`crf` is for \.mp4 files"):
        request(FileOptions(crf=20), "a.jpg")
    with pytest.raises(InputError, match="`quality`: no file is written; give `save_paths`"):
        request(FileOptions(quality=50))
    with pytest.raises(OutputError, match="no room in a JPEG"):
        request(FileOptions(), "a.jpg", prompt=os.urandom(80_000).hex())
    with pytest.raises(OutputError, match=r"settings of 9\d+ bytes; a file holds 8388608 at most"):
        request(FileOptions(), "a.png", prompt="x" * 9_000_000)
