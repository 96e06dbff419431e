"""ExtraInputs: which files they name, and what belongs to one sample of several."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kdit.errors import InputError
from kdit.pipelines.extra_inputs import ExtraInputs, MediaInputs


@dataclass(frozen=True, kw_only=True)
class Inputs(ExtraInputs):
    text: str | list[str] | None = None
    start_path: str | list[str] | None = None
    reference_paths: list[str] | list[list[str]] | None = None
    layers: tuple[int, ...] = ()


def test_what_is_given_and_which_files_it_names() -> None:
    assert Inputs().given() == {} and Inputs().files() == ()
    inputs = Inputs(text="a.png", start_path=["b.png", "c.png"], reference_paths=[["c.png"], ["d.png", "b.png"]])
    assert list(inputs.given()) == ["text", "start_path", "reference_paths"]
    assert inputs.files() == ("b.png", "c.png", "d.png")


def test_a_sample_has_its_own_entry_of_a_list() -> None:
    inputs = Inputs(text=["x", "y"], start_path="b.png", reference_paths=["r.png", "s.png"], layers=(1, 2))
    own = {"text": "y", "start_path": "b.png", "reference_paths": ["r.png", "s.png"], "layers": (1, 2)}
    assert inputs.of_sample(1, 2) == own
    assert Inputs(reference_paths=[["r.png"], ["s.png"]]).of_sample(1, 2) == {"reference_paths": ["s.png"]}
    assert Inputs(text=["x"]).of_sample(0, 1) == {"text": ["x"]}


def test_what_is_given_for_a_prompt_serves_all_samples_of_it() -> None:
    inputs = Inputs(text=["x", "y"], start_path=["b.png", "c.png"], reference_paths=["r.png", "s.png"], layers=(1, 2))
    repeated = inputs.repeated(2, 2)
    assert repeated.given() == {
        "text": ["x", "x", "y", "y"],
        "start_path": ["b.png", "b.png", "c.png", "c.png"],
        "reference_paths": ["r.png", "s.png"],  # of every prompt
        "layers": (1, 2),
    }
    assert Inputs(reference_paths=[["r"], ["s"]]).repeated(2, 2).reference_paths == [["r"], ["r"], ["s"], ["s"]]
    four = Inputs(text=["a", "b", "c", "d"], start_path="b.png")
    assert four.repeated(2, 2) == four and inputs.repeated(1, 2) == inputs


def test_media_that_a_pipeline_does_not_take_are_named() -> None:
    MediaInputs(images=("a.png",)).refuse("Model", "images")
    with pytest.raises(InputError, match="Model takes no `mask`, `control`; it takes `images`"):
        MediaInputs(images=("a.png",), mask="m.png", control="c.png").refuse("Model", "images")
    with pytest.raises(InputError, match="it takes text only"):
        MediaInputs(last_image="z.png").refuse("Model")
