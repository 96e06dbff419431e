"""The words of --components."""

from __future__ import annotations

import pytest

from kdit.cli.components import parse_components
from kdit.errors import InputError


def test_folder_names_and_none() -> None:
    assert parse_components([]) is None
    assert parse_components(["/a b/c=d"]) == {"base": "/a b/c=d"}
    assert parse_components(["X", "vae=x=y.safetensors", "text_encoder_3=none"]) == {
        "base": "X", "vae": "x=y.safetensors", "text_encoder_3": None,
    }  # fmt: skip
    assert parse_components(["none"]) == {"base": "none"}  # a folder of that name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([""], "'' names no path; expected FOLDER, NAME=PATH or NAME=none"),
        (["vae="], "'vae=' names no path"),
        (["A", "B"], "gives a folder twice: A and B"),
        (["vae=A", "vae=none"], "gives vae twice: A and none"),
    ],
)
def test_mistakes(values: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_components(values)
