"""`--extra NAME=VALUE`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kdit.cli.extra import parse_extra, with_extra
from kdit.cli.main import app
from kdit.errors import InputError
from kdit.keys import PipelineKey
from kdit.media.metadata import read_settings
from kdit.pipelines.registry import family_pipeline

SD3 = family_pipeline(PipelineKey.SD3_T2I)
FILL = family_pipeline(PipelineKey.FLUX1_FILL)


def test_values_have_the_kind_of_their_field() -> None:
    given = parse_extra(["prompt_2=a=b [c]", "skip_layers=[1, 2]", "skip_layer_scale=3", "skip_layer_stop=0.5"])
    extra = with_extra(SD3, None, given)
    assert extra is not None
    assert extra.given() == {
        "prompt_2": "a=b [c]",
        "skip_layers": (1, 2),
        "skip_layer_scale": 3,
        "skip_layer_stop": 0.5,
    }
    assert with_extra(SD3, extra, {}) is extra
    replaced = with_extra(SD3, extra, {"prompt_2": "other"})
    assert replaced is not None and replaced.given() == {**extra.given(), "prompt_2": "other"}
    flags = with_extra(FILL, None, {"composite": "true", "mask_binarize": "false"})
    assert flags is not None and flags.given() == {"composite": True, "mask_binarize": False}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["prompt_2"], "must be NAME=VALUE"),
        (["a b=1"], "must be NAME=VALUE"),
        (["prompt_2=x", "prompt_2=y"], "gives prompt_2 twice"),
        (["promt_2=x"], "promt_2: sd3-t2i has no such input; it has prompt_2, prompt_3"),
        (["skip_layers=7"], r"skip_layers must be a list such as \[7, 8, 9\], got '7'"),
        (["skip_layer_scale=high"], "skip_layer_scale must be a number, got 'high'"),
    ],
)
def test_mistakes_are_named(values: list[str], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        with_extra(SD3, None, parse_extra(values))


def test_a_file_says_what_was_given_and_is_made_again_with_it(
    reference_family: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = str(reference_family("sd35_medium") / "model")
    options = ["--model", model, "--size", "32x32", "--steps", "3", "--seed", "1", "--cfg", "4"]
    extra = ["--extra", "skip_layers=[1]", "--extra", "skip_layer_stop=1", "--extra", "prompt_2=a boat"]
    for arguments in (
        ["fox", *options, *extra, "-o", "a.png"],
        ["--from", "a.png", "-o", "b.png"],
        ["fox", *options, "-o", "c.png"],
    ):
        done = CliRunner().invoke(app, ["generate", *arguments])
        assert done.exit_code == 0, done.output
    assert read_settings(Path("a.png"))["extra_inputs"] == {
        "prompt_2": "a boat",
        "skip_layers": [1],
        "skip_layer_stop": 1,
    }
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes() != Path("c.png").read_bytes()
