"""Registry of GeneratorDefs."""

import pytest

from kdit.errors import RegistryError
from kdit.generators.registry import generator_def, generator_keys, register_generator_def
from kdit.keys import ModelKey


def test_a_definition_is_loaded_when_asked_for() -> None:
    assert generator_def(ModelKey.FLUX1).model_key is ModelKey.FLUX1
    assert ModelKey.FLUX1 in generator_keys()


def test_a_duplicate_is_refused() -> None:
    with pytest.raises(RegistryError, match="already"):
        register_generator_def(generator_def(ModelKey.FLUX1))


def test_a_miss_lists_what_there_is() -> None:
    with pytest.raises(RegistryError, match="no GeneratorDef for Wan2_2_T2V_14B_LOW; there are: FLUX1"):
        generator_def(ModelKey.Wan2_2_T2V_14B_LOW)
