"""Messages of the library, as the command line words them."""

import dataclasses
import inspect

import pytest

from kdit.cli.generate_command import generate
from kdit.cli.option_names import OPTIONS, with_options
from kdit.config import ExecuteConfig, FileOptions, RuntimeConfig, SampleConfig
from kdit.errors import InputError
from kdit.keys import PipelineKey
from kdit.pipelines.extra_inputs import MediaInputs
from kdit.pipelines.pipeline import Pipeline
from kdit.pipelines.registry import family_pipeline

MEDIA = {"images": "--image", "mask": "--mask", "control": "--control", "last_image": "--last-image"}


@pytest.mark.parametrize(
    ("message", "worded"),
    [
        ("`size` 17x31: too small (or `fit` crop)", "--size 17x31: too small (or --fit crop)"),
        ("`RuntimeConfig.frame_num` must be 1", "--frames must be 1"),
        ("`extra_inputs.prompt_2` has 2 entries", "--extra prompt_2 has 2 entries"),
        ("give `FluxFillExtraInputs.image_path`", "give --image"),
        ("`OtherExtraInputs.style_path`", "--extra style_path"),
        ("cannot read 'cfg_scale size.png'", "cannot read 'cfg_scale size.png'"),  # no field: no backquotes
        ("`unknown` and `ExecuteConfig.attention`", "`unknown` and `ExecuteConfig.attention`"),
    ],
)
def test_fields_become_options(message: str, worded: str) -> None:
    assert with_options(message) == worded


def test_every_option_of_the_table_exists_and_every_field_does() -> None:
    given = {
        name
        for parameter in inspect.signature(generate, eval_str=True).parameters.values()
        for name in (
            [f"--{parameter.name.replace('_', '-')}"]
            + [str(d) for d in parameter.annotation.__metadata__[0].param_decls or ()]
        )
    }
    assert {option for option in OPTIONS.values() if option != "PROMPT"} <= given
    configs = (SampleConfig, RuntimeConfig, ExecuteConfig, FileOptions, MediaInputs)
    extras = [takes for takes in (family_pipeline(key).extra_inputs for key in PipelineKey) if takes is not None]
    known = {field.name for config in (*configs, *extras) for field in dataclasses.fields(config)}
    assert OPTIONS.keys() <= known | set(inspect.signature(Pipeline.generate).parameters)


@pytest.mark.parametrize("key", list(PipelineKey), ids=lambda key: str(key.value))
def test_the_fields_that_files_of_a_command_line_become_have_its_options(key: PipelineKey) -> None:
    family, taken = family_pipeline(key), 0
    for name, option in MEDIA.items():
        media = MediaInputs(**{name: ("a.png",) if name == "images" else "a.png"})  # type: ignore[arg-type]
        try:
            extra = family.take_media(media)
        except InputError as error:
            assert f"takes no {option}" in with_options(str(error))
            continue
        assert extra is not None
        for field in extra.given():
            assert with_options(f"`extra_inputs.{field}`") == option
            taken += 1
    assert taken or family.from_media is None
