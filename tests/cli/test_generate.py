import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from typer.testing import CliRunner

from kdit.cli.generate import cancel_on_interrupt
from kdit.cli.main import app
from kdit.cli.results import output_paths, save_latents
from kdit.errors import Cancelled, NonFiniteError, OutputError
from kdit.media.metadata import read_settings
from kdit.nodes.core.step_report import StepReport
from kdit.pipelines.cancel_token import CancelToken
from kdit.pipelines.pipeline import Pipeline
from kdit.version import __version__

RUN = CliRunner()
QUICK = ["--size", "64x64", "--steps", "2", "--device", "cpu"]


# ---- places --------------------------------------------------------------------------------------


def test_one_sample_keeps_its_name_and_several_are_numbered() -> None:
    assert output_paths(Path("out/heart.png"), 1) == (Path("out/heart.png"),)
    assert output_paths(Path("out/heart.v2.png"), 2) == (Path("out/heart.v2-0.png"), Path("out/heart.v2-1.png"))


@pytest.mark.parametrize("name", ["x.tif", "x", "x.png.txt", ".png"])
def test_other_suffixes_are_refused(name: str) -> None:
    with pytest.raises(OutputError, match=r"must end in \.png or .* or \.safetensors"):
        output_paths(Path(name), 1)


def test_latents_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    save_latents(path, torch.arange(6.0).reshape(1, 2, 3), {"prompt": "狐"})
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("latents"), torch.arange(6.0).reshape(1, 2, 3))
        assert json.loads(file.metadata()["kdit"]) == {"prompt": "狐"}

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", fail)
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        save_latents(path, torch.zeros(1, 2, 3), {})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# ---- Ctrl-C --------------------------------------------------------------------------------------


def test_the_first_ctrl_c_asks_and_the_second_interrupts() -> None:
    token = CancelToken()
    before = signal.getsignal(signal.SIGINT)
    with cancel_on_interrupt(token):
        signal.raise_signal(signal.SIGINT)
        assert token.is_set
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("loader", "told"),
    [("load_text_encoder", "kdit: cancelled while loading"), ("load_vae", "kdit: cancelled after step 0 of 24")],
)
def test_ctrl_c_while_loading_is_not_lost(
    loader: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kdit.nodes.io.load_model as module

    load = getattr(module, loader)

    def interrupted(*args: object, **options: object) -> object:
        if not asked:
            asked.append(loader)
            signal.raise_signal(signal.SIGINT)
        return load(*args, **options)

    asked: list[str] = []
    monkeypatch.setattr(module, loader, interrupted)
    result = RUN.invoke(app, ["generate", "a", "-o", str(tmp_path / "x.png")])
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (130, told)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_behind_stdout_is_told(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    command = [sys.executable, "-m", "kdit.cli.main", "generate", "a", "-o", str(tmp_path / "x.png"), "--steps", "1"]
    with full.open("w") as disk:
        done = subprocess.run(command, stdout=disk, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "cannot write to standard output" in done.stderr.splitlines()[-1]


# ---- errors of the pipeline ----------------------------------------------------------------------


def invoke_with_error(error: BaseException, monkeypatch: pytest.MonkeyPatch, folder: Path) -> SimpleNamespace:
    def load_models(_: Pipeline, **__: object) -> None:
        raise error

    monkeypatch.setattr(Pipeline, "load_models", load_models)
    result = RUN.invoke(app, ["generate", "a", "-o", str(folder / "x.png")])
    return SimpleNamespace(
        code=result.exit_code, err=result.stderr.splitlines(), out=result.stdout, error=result.exception
    )


def test_a_result_that_is_not_finite_exits_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke_with_error(NonFiniteError("NaN in step 3"), monkeypatch, tmp_path)
    assert (result.code, result.err[-1], result.out) == (1, "kdit: error: NaN in step 3", "")


def test_cancelled_exits_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke_with_error(Cancelled("cancelled"), monkeypatch, tmp_path)
    assert (result.code, result.err[-1]) == (130, "kdit: cancelled")


def test_a_bug_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke_with_error(ZeroDivisionError("bug"), monkeypatch, tmp_path)
    assert result.code == 1
    assert isinstance(result.error, ZeroDivisionError)


# ---- with the built-in model ---------------------------------------------------------------------


def test_a_picture_with_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "heart.png"
    result = RUN.invoke(app, ["generate", "red heart", "-o", str(path), "--seed", "0", *QUICK])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"wrote {path} (seed 0, ")
    assert "step 2/2" in result.stderr
    with Image.open(path) as image:
        assert image.size == (64, 64)
        assert any("red heart" in str(value) for value in image.info.values())
    assert list(tmp_path.iterdir()) == [path]


def test_several_prompts_are_numbered_prompt_major(tmp_path: Path) -> None:
    arguments = ["red heart", "blue car", "-o", str(tmp_path / "x.png"), "--num", "2", "--seed", "7", "--json", *QUICK]
    result = RUN.invoke(app, ["generate", *arguments])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["files"] == [str(tmp_path / f"x-{i}.png") for i in range(4)]
    assert report["seeds"] == [7, 8, 9, 10]
    assert report["sheet"] == str(tmp_path / "x-sheet.png")
    with Image.open(report["sheet"]) as sheet:
        assert sheet.width > 2 * 64 and sheet.height > 2 * 64
        assert json.loads(sheet.info["contact sheet"])["files"] == [f"x-{i}.png" for i in range(4)]
    assert report["settings"]["steps"] == 2
    assert report["timings"]["command"] > 0
    pictures = [Path(file).read_bytes() for file in report["files"]]
    assert len(set(pictures)) == 4
    alone = tmp_path / "alone.png"
    RUN.invoke(app, ["generate", "blue car", "-o", str(alone), "--seed", "9", *QUICK])
    with Image.open(alone) as a, Image.open(report["files"][2]) as b:
        differences = [abs(x - y) for x, y in zip(a.tobytes(), b.tobytes(), strict=True)]
    assert max(differences) <= 1


def test_several_files_are_listed(tmp_path: Path) -> None:
    result = RUN.invoke(app, ["generate", "a", "b", "-o", str(tmp_path / "x.png"), "--seed", "7", *QUICK])
    lines = result.stdout.splitlines()
    assert lines[:2] == [f"wrote {tmp_path}/x-0.png (seed 7)", f"wrote {tmp_path}/x-1.png (seed 8)"]
    assert lines[2] == f"wrote {tmp_path}/x-sheet.png (all of them)"
    assert lines[3].startswith("2 files in ")


@pytest.mark.parametrize("option", [["--no-sheet"], ["-o", "x.safetensors"]], ids=["no sheet", "latents"])
def test_there_may_be_no_sheet(option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = RUN.invoke(app, ["generate", "a", "--num", "2", "-o", "x.png", "--json", *QUICK, *option])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["sheet"] is None
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("suffix", [".jpg", ".webp"])
def test_other_picture_files_and_the_default_name(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for output in (["-o", f"x{suffix}"], []):
        result = RUN.invoke(app, ["generate", "かわいい 😄 ō", "--seed", "5", *QUICK, *output])
        assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kdit.png", f"x{suffix}"]
    for name in ("kdit.png", f"x{suffix}"):
        settings = read_settings(name)
        assert (settings["prompt"], settings["seed"], settings["model"]) == ("かわいい 😄 ō", 5, "mini")
        assert settings["kdit_version"] == __version__ and len(str(settings["model_hash"])) == 64
    with Image.open("kdit.png") as png, Image.open(f"x{suffix}") as other:
        differences = [abs(a - b) for a, b in zip(png.tobytes(), other.tobytes(), strict=True)]
    assert sum(differences) / len(differences) < (3 if suffix == ".jpg" else 1e-9)


@pytest.mark.parametrize("prompt", ["", " ".join(["heart"] * 600), "かわいい 😄 ō"], ids=["empty", "long", "emoji"])
def test_unusual_prompts(prompt: str, tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    result = RUN.invoke(app, ["generate", prompt, "-o", str(path), *QUICK])
    assert result.exit_code == 0, result.output
    with Image.open(path) as image:
        assert json.loads(image.info["kdit"])["prompt"] == prompt


def test_a_prompt_that_is_too_long_can_be_refused(tmp_path: Path) -> None:
    arguments = [" ".join(["heart"] * 600), "-o", str(tmp_path / "x.png"), "--long-prompt", "reject", *QUICK]
    result = RUN.invoke(app, ["generate", *arguments])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("kdit: error: ")
    assert list(tmp_path.iterdir()) == []


def test_the_options_reach_the_picture(tmp_path: Path) -> None:
    plain = ["generate", "red heart", "--seed", "1", "--json", *QUICK]
    options = ["--cfg", "2", "--negative", "blue", "--max-sequence-length", "20", "--modulation", "inline"]
    files = [tmp_path / "plain.png", tmp_path / "other.png"]
    settings = [
        json.loads(RUN.invoke(app, [*plain, "-o", str(path), *more]).stdout)["settings"]
        for path, more in zip(files, ([], [*options, "--batch-invariant"]), strict=True)
    ]
    assert {key: settings[1][key] for key in settings[1] if settings[0][key] != settings[1][key]} == {
        "cfg_scale": 2.0,
        "negative_prompt": "blue",
        "max_sequence_length": 20,
        "modulation": "inline",
        "batch_invariant": True,
    }
    assert files[0].read_bytes() != files[1].read_bytes()


def test_ctrl_c_after_the_last_step_keeps_the_whole_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt_at_the_end(_: object) -> Callable[[StepReport], None]:
        def after_step(report: StepReport) -> None:
            if report.step_index + 1 == report.num_steps:
                signal.raise_signal(signal.SIGINT)

        return after_step

    monkeypatch.setattr("kdit.cli.generate._step_printer", interrupt_at_the_end)
    path = tmp_path / "x.png"
    result = RUN.invoke(app, ["generate", "red heart", "-o", str(path), *QUICK])
    assert result.exit_code == 130
    assert result.stdout.startswith(f"wrote {path}")
    with Image.open(path) as image:
        image.load()


def test_a_second_ctrl_c_interrupts_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt_twice(_: object) -> Callable[[StepReport], None]:
        def after_step(_: StepReport) -> None:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

        return after_step

    monkeypatch.setattr("kdit.cli.generate._step_printer", interrupt_twice)
    result = RUN.invoke(app, ["generate", "red heart", "-o", str(tmp_path / "x.png"), *QUICK])
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "kdit: interrupted"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("as_json", [False, True], ids=["plain", "json"])
def test_what_has_no_effect_is_told_once(as_json: bool, tmp_path: Path) -> None:
    prompts = [" ".join(["heart"] * 600)] * 2
    arguments = ["-o", str(tmp_path / "x.png"), "--cfg", "1", "--negative", "blue", *QUICK, *["--json"] * as_json]
    result = RUN.invoke(app, ["generate", *prompts, *arguments])
    assert result.exit_code == 0, result.output
    notes = [line for line in result.stderr.splitlines() if line.startswith("kdit: note: ")]
    assert len(notes) == len(set(notes))
    for part in ("--negative has no effect: --cfg is 1", "tokens for T5", "tokens for CLIP"):
        assert len([note for note in notes if part in note]) == 1 == result.stderr.count(part)
    if as_json:
        assert [f"kdit: note: {notice}" for notice in json.loads(result.stdout)["notices"]] == notes
    else:
        assert "note" not in result.stdout


def test_latents_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    result = RUN.invoke(app, ["generate", "red heart", "-o", str(path), "--seed", "3", *QUICK])
    assert result.exit_code == 0, result.output
    with safe_open(path, "pt") as file:
        assert file.get_tensor("latents").shape == (1, 16, 64)
        settings = json.loads(file.metadata()["kdit"])
    assert settings["seed"] == 3
    assert settings["steps"] == 2


def test_a_size_the_model_cannot_make_is_one_line(tmp_path: Path) -> None:
    arguments = ["red heart", "-o", str(tmp_path / "x.png"), "--size", "17x31", "--steps", "1"]
    result = RUN.invoke(app, ["generate", *arguments])
    assert result.exit_code == 2
    complaints = [line for line in result.stderr.splitlines() if line.startswith("kdit: error: ")]
    assert len(complaints) == 1
    assert result.stderr.splitlines()[-1] == complaints[0]
    assert "16x32" in complaints[0]
    assert list(tmp_path.iterdir()) == []


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    result = RUN.invoke(app, ["generate", "a", "--model", str(tmp_path / "no"), "-o", str(tmp_path / "x.png")])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("kdit: error: ")


# ---- in processes of their own -------------------------------------------------------------------

ASCII = {**os.environ, "LC_ALL": "C"}  # left alone, Python takes UTF-8 there
REALLY_ASCII = {**ASCII, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
# Two commands in one process, whose imports take longer than all else: a picture, then the rest of the arguments.
PICTURE_THEN_MORE = """
import sys
from kdit.cli.main import app
more = sys.argv.index("then")
try:
    app(["generate", *sys.argv[1:more]])
except SystemExit as end:
    if end.code:
        raise
app(["generate", *sys.argv[more + 1:]])
"""


def test_a_refusal_names_any_file_in_an_ascii_locale() -> None:
    code = "from kdit.cli.main import app; app()"
    for environment in (ASCII, REALLY_ASCII):
        command = [sys.executable, "-c", code, "generate", "かわいい 😄 ō", "-o", "かわいい.tif"]
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith(b"kdit: error: cannot write ") and done.stderr.count(b"\n") == 1
        assert ("かわいい.tif" in done.stderr.decode()) == (environment is ASCII)  # elsewhere as escapes


@pytest.mark.slow
def test_any_script_in_an_ascii_locale_and_ctrl_c_between_two_steps(tmp_path: Path) -> None:
    prompt, path = "かわいい 😄 ō", tmp_path / "かわいい.png"
    picture = [prompt, "-o", str(path), "--seed", "1", *QUICK]
    endless = [prompt, "-o", str(tmp_path / "x.png"), *QUICK, "--steps", "1000", "--modulation", "inline"]
    process = subprocess.Popen(
        [sys.executable, "-c", PICTURE_THEN_MORE, *picture, "then", *endless],
        env=REALLY_ASCII,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    encoding = (line for line in process.stderr if line.startswith("encoding"))
    next(encoding)
    assert next(encoding)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert out.startswith("wrote ") and out.count("\n") == 1  # the picture
    *before, last = err.splitlines()
    assert all(line.startswith("step ") for line in before)
    assert re.fullmatch(r"kdit: cancelled after step \d+ of 1000", last)
    assert list(tmp_path.iterdir()) == [path]
    with Image.open(path) as image:
        assert json.loads(image.info["kdit"])["prompt"] == prompt


def test_a_mistake_is_told_before_the_weights_are_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(_: Pipeline, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(Pipeline, "load_models", never)
    monkeypatch.chdir(tmp_path)
    for arguments, told in (
        (["--size", "17x31"], "--size 17x31: width and height must be multiples of 16; nearest: 16x32 (or --fit"),
        (["--max-sequence-length", "513"], "1 to 512"),
        (["--steps", "0"], "--steps must be"),
        (["--seed", "-1"], "--seed must be"),
        (["-o", "missing/a.png"], "does not exist"),
        (["-o", "a.mp4"], "must end in .png or .jpg"),
        (["-o", "a.tif"], "must end in .png or .jpg"),
        (["--frames", "5"], "--frames is 5, but this pipeline makes single pictures"),
        (["--fps", "fast"], "--fps must be a number"),
        (["--last-image", "a.png"], "takes no --last-image; it takes --image"),
        (["--strength", "0.5"], "--strength is 0.5, but there is no image"),
        (["--cfg2", "3"], "--cfg2 is for models with a second expert"),
        (["--guidance", "-1"], "--guidance must be"),
        (
            ["--cfg", "1", "--extra", "negative_prompt_2=y"],
            "--extra negative_prompt_2 needs classifier-free guidance: set --cfg above 1",
        ),
        (["--quality", "50"], "--quality is for .jpg, .jpeg, .webp files"),
        (["--quality", "0", "-o", "a.jpg"], "--quality must be a whole number from 1 to 100, got 0"),
        (["--crf", "20", "-o", "a.webp"], "--crf is for .mp4 files"),
        (["--pixel-format", "yuv444p", "-o", "a.png"], "--pixel-format is for .mp4 files"),
        (["--quality", "50", "-o", "a.safetensors"], "--quality is for .jpg, .jpeg, .webp files"),
        (["--crf", "52", "-o", "a.mp4"], "--crf must be a whole number from 0 to 51, got 52"),
    ):
        result = RUN.invoke(app, ["generate", "a", *arguments])
        assert result.exit_code == 2 and told in result.stderr, result.output
    assert list(tmp_path.iterdir()) == []
