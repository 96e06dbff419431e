"""Registry of GeneratorDefs, filled by importing the module of a key's family when it is first asked for."""

from __future__ import annotations

from importlib import import_module

from kdit.errors import RegistryError
from kdit.generators.generator_def import GeneratorDef
from kdit.keys import FAMILIES, ModelKey, family_of_model

_GENERATOR_DEF_REGISTRY: dict[ModelKey, GeneratorDef] = {}


def register_generator_def(definition: GeneratorDef) -> GeneratorDef:
    """Add a definition. Raises RegistryError if its key has one already."""
    if definition.model_key in _GENERATOR_DEF_REGISTRY:
        raise RegistryError(f"{definition.model_key} has a GeneratorDef already")
    _GENERATOR_DEF_REGISTRY[definition.model_key] = definition
    return definition


def generator_def(key: ModelKey) -> GeneratorDef:
    """The definition for ``key``. Raises RegistryError naming what there is."""
    if key not in _GENERATOR_DEF_REGISTRY:
        import_module(f"kdit.generators.defs.{family_of_model(key).name}")
    if key not in _GENERATOR_DEF_REGISTRY:
        raise RegistryError(
            f"no GeneratorDef for {key.name}; there are: {', '.join(sorted(k.name for k in generator_keys()))}"
        )
    return _GENERATOR_DEF_REGISTRY[key]


def generator_keys() -> tuple[ModelKey, ...]:
    """Keys of all networks that have a definition: of two experts only the first has one."""
    for entry in FAMILIES.values():
        import_module(f"kdit.generators.defs.{entry.name}")
    return tuple(key for entry in FAMILIES.values() for key in entry.model_keys if key in _GENERATOR_DEF_REGISTRY)
