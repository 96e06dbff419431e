import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kdit.cli.main import app, parse_size, readable_text
from kdit.cli.messages import notes_on_stderr, one_line_errors
from kdit.errors import Cancelled, CheckpointMissingError, InputError, NonFiniteError, PinError
from kdit.version import __version__

RUN = CliRunner()


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_version() -> None:
    result = RUN.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"kdit {__version__}\n")


def test_help_names_the_commands_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from kdit.cli.main import app\n"
        "result = CliRunner().invoke(app, ['--help']); assert result.exit_code == 0; print(result.stdout)\n"
        "print(sorted({'torch', 'numpy', 'diffusers', 'transformers', 'PIL'} & set(sys.modules)))"
    )
    lines = python(code).splitlines()
    assert lines[-1] == "[]"
    assert {"generate", "verify", "inspect"} <= {word for line in lines for word in line.split()[:1]}


def test_help_takes_less_than_half_a_second() -> None:
    def child_seconds() -> float:  # of the processor: other programs may be busy
        times = os.times()
        return times.children_user + times.children_system

    before = child_seconds()
    python("import sys; sys.argv = ['kdit', '--help']; from kdit.cli.main import app; app()")
    assert 0 < child_seconds() - before < 0.5


@contextmanager
def exit_code(expected: int) -> Iterator[None]:
    with pytest.raises(typer.Exit) as caught, one_line_errors():
        yield
    assert caught.value.exit_code == expected


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("size 17x31\nis odd"), 2, "kdit: error: size 17x31 is odd"),
        (PinError("no pin"), 2, "kdit: error: no pin"),
        (CheckpointMissingError("no folder x"), 2, "kdit: error: no folder x"),
        (NonFiniteError("NaN in step 3"), 1, "kdit: error: NaN in step 3"),
        (Cancelled("cancelled after step 2 of 8"), 130, "kdit: cancelled after step 2 of 8"),
        (KeyboardInterrupt(), 130, "kdit: interrupted"),
    ],
)
def test_each_deliberate_error_is_one_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with exit_code(code):
        raise error
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", line + "\n")


def test_a_table_follows_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    with exit_code(2):
        raise CheckpointMissingError("x lacks\na and b", table="  a  missing\n  b  missing")
    assert capsys.readouterr().err == "kdit: error: x lacks a and b\n  a  missing\n  b  missing\n"


def test_a_bug_is_not_dressed_up() -> None:
    with pytest.raises(ZeroDivisionError), one_line_errors():
        raise ZeroDivisionError


def test_sizes() -> None:
    assert parse_size("1024x768") == (1024, 768)
    assert parse_size("64X32") == (64, 32)


@pytest.mark.parametrize("text", ["17x", "x17", "0x10", "10x0", "-5x10", "10", "1x2x3", "1.5x2", "axb", ""])
def test_bad_sizes_are_one_line(text: str) -> None:
    with pytest.raises(InputError, match="WIDTHxHEIGHT"):
        parse_size(text)
    result = RUN.invoke(app, ["generate", "a", "--size", text])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("kdit: error: --size")


def test_undecodable_arguments() -> None:
    assert readable_text("かわいい 😄", "PROMPT") == "かわいい 😄"
    garbled = "狐".encode().decode("ascii", "surrogateescape")
    if sys.getfilesystemencoding() == "utf-8":
        assert readable_text(garbled, "PROMPT") == "狐"
    with pytest.raises(InputError, match="PROMPT is not valid UTF-8"):
        readable_text(b"\xff".decode("ascii", "surrogateescape"), "PROMPT")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--dtype", "float8"],
        ["--steps", "0"],
        ["--seed", "-1"],
        ["--guidance", "nan"],
        ["--max-sequence-length", "0"],
        ["-o", "x.tif"],
        ["-o", "missing/x.png"],
    ],
)
def test_bad_options_are_one_line_before_anything_loads(
    arguments: list[str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    result = RUN.invoke(app, ["generate", "a", "--model", "no/such/model", *arguments])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("kdit: error: ")
    assert "no/such/model" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "named", "command"),
    [
        ("generate a --num 0", "'--num'", " generate"),
        ("generate a --seed x", "'--seed'", " generate"),
        ("generate a --modulation both", "'table', 'inline'", " generate"),
        ("generate a --size", "'--size'", " generate"),
        ("generate a --paint", "--paint", " generate"),
        ("generate", "PROMPT", " generate"),
        ("verify", "DIR", " verify"),
        ("inspect a b", "(b)", " inspect"),
        ("--paint", "--paint", ""),
        ("paint", "'paint'", ""),
        ("generat", "Did you mean 'generate'?", ""),
    ],
)
def test_usage_errors_are_one_line(arguments: str, named: str, command: str) -> None:
    result = RUN.invoke(app, arguments.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("kdit: error: ") and result.stderr.count("\n") == 1
    assert named in result.stderr
    assert result.stderr.endswith(f" (see kdit{command} --help)\n")


def test_without_arguments_there_is_the_help() -> None:
    result = RUN.invoke(app, [])
    assert result.exit_code == 2
    assert {"generate", "verify", "inspect"} <= {line.split()[0] for line in result.output.splitlines() if line.strip()}
    assert "error" not in result.output


# ---- notes ---------------------------------------------------------------------------------------


def test_a_warning_is_a_note_and_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("kdit.somewhere")
    with notes_on_stderr():
        logger.warning("run-1: the rest of\nthe prompt is not seen")
        logger.warning("run-2: the rest of\nthe prompt is not seen")
        logger.warning("%d pictures", 3)
        logger.info("not a warning")
    logger.warning("later")
    captured = capsys.readouterr()
    notes = [line for line in captured.err.splitlines() if line.startswith("kdit: ")]
    assert notes == ["kdit: note: the rest of the prompt is not seen", "kdit: note: 3 pictures"]
    assert captured.out == ""


# ---- verify and inspect --------------------------------------------------------------------------


def test_verify_of_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    missing = RUN.invoke(app, ["verify", str(empty / "missing")])
    assert missing.exit_code == 2
    assert missing.stderr.startswith("kdit: error: no folder")
    nothing = RUN.invoke(app, ["verify", str(empty)])
    assert nothing.exit_code == 2 and nothing.stdout == ""
    assert "no case to verify; expected FAMILY/model and FAMILY/cases" in nothing.stderr
    device = RUN.invoke(app, ["verify", str(empty), "--device", "abacus"])
    assert device.exit_code == 2
    assert device.stderr.startswith("kdit: error: device 'abacus'")
    as_json = RUN.invoke(app, ["verify", str(empty), "--json"])
    assert as_json.exit_code == 2 and as_json.stdout == ""


def test_inspect_prints_text_and_json() -> None:
    text = RUN.invoke(app, ["inspect", "mini"])
    assert text.exit_code == 0
    assert "transformer" in text.stdout
    report = json.loads(RUN.invoke(app, ["inspect", "mini", "--json"]).stdout)
    assert isinstance(report, dict)
    missing = RUN.invoke(app, ["inspect", "no/such/folder"])
    assert missing.exit_code == 2
    assert missing.stderr.startswith("kdit: error: ")
    assert len(missing.stderr.splitlines()) == 1


def test_inspect_of_an_unusable_folder_reports_and_exits_1(tmp_path: Path) -> None:
    text, as_json = RUN.invoke(app, ["inspect", str(tmp_path)]), RUN.invoke(app, ["inspect", str(tmp_path), "--json"])
    assert (text.exit_code, as_json.exit_code) == (1, 1)
    assert text.stdout.splitlines()[0].startswith(str(tmp_path))
    assert text.stdout.splitlines()[-1].startswith("NOT usable")
    assert json.loads(as_json.stdout)["ok"] is False
    assert text.stderr == as_json.stderr == ""
