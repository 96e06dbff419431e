"""`--components` of the command line: where a model's components come from. Used by the commands that open a model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kdit.errors import InputError

_NAMED = re.compile(r"([a-z][a-z0-9_]*)=(.*)", re.DOTALL)
_NONE = "none"


def parse_components(values: Sequence[str]) -> dict[str, str | None] | None:
    """``FOLDER`` (one at most), ``name=PATH`` or ``name=none``, as ``Pipeline.from_models`` takes them.

    None if there are none. Raises InputError on an empty path and on a component that is given twice.
    """
    found: dict[str, str | None] = {}
    for value in values:
        match = _NAMED.fullmatch(value)
        name, path = match.groups() if match else ("base", value)
        if not path:
            raise InputError(f"--components {value!r} names no path; expected FOLDER, NAME=PATH or NAME={_NONE}")
        if name in found:
            what = "a folder" if name == "base" else name
            raise InputError(f"--components gives {what} twice: {found[name]} and {path}")
        found[name] = None if path == _NONE and match else path
    return found or None
