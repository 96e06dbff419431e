"""`--extra NAME=VALUE`: inputs that only one pipeline has, such as a second prompt. Used by cli/generate.py."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from kdit.errors import InputError
from kdit.pipelines.extra_inputs import ExtraInputs

if TYPE_CHECKING:
    from kdit.pipelines.family_pipeline import FamilyPipeline


def parse_extra(values: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` to a mapping. Raises InputError."""
    found: dict[str, str] = {}
    for value in values:
        name, separator, text = value.partition("=")
        if not separator or not name.isidentifier():
            raise InputError(f"--extra must be NAME=VALUE, for example prompt_2=..., got {value!r}")
        if name in found:
            raise InputError(f"--extra gives {name} twice")
        found[name] = text
    return found


def with_extra(family: FamilyPipeline, extra: ExtraInputs | None, given: Mapping[str, str]) -> ExtraInputs | None:
    """``extra`` with the fields that ``given`` names. Raises InputError for an unknown name or value."""
    if not given:
        return extra
    known = {} if family.extra_inputs is None else {f.name: f for f in dataclasses.fields(family.extra_inputs)}
    unknown = [name for name in given if name not in known]
    if unknown or family.extra_inputs is None:
        raise InputError(
            f"--extra {', '.join(unknown)}: {family.key.value} has no such input; it has {', '.join(known) or 'none'}"
        )
    values = {name: _value(name, text, known[name].default) for name, text in given.items()}
    return dataclasses.replace(extra or family.extra_inputs(), **values)


def _value(name: str, text: str, default: object) -> object:
    """``text`` as the kind of value that the field's default is; text stands as it is."""
    if default is None or isinstance(default, str):
        return text
    try:
        value: object = json.loads(text)
    except ValueError:
        value = text
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(cast(list[object], value))
    number = isinstance(default, float) and type(value) in (int, float)
    if not number and (type(value) is not type(default)):
        kind = {bool: "true or false", int: "a whole number", float: "a number", tuple: "a list such as [7, 8, 9]"}
        raise InputError(f"--extra {name} must be {kind[type(default)]}, got {text!r}")
    return value
