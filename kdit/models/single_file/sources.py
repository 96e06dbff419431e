"""ComponentSources: where the caller says that components come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kdit.errors import InputError

BASE = "base"

Components = str | Path | Mapping[str, str | Path | None]
"""A folder of a whole pipeline; or component -> its folder or file, None: left out. The name "base" in the
mapping stands for a folder of a whole pipeline."""


@dataclass(frozen=True)
class ComponentSources:
    """What ``components`` of ``Pipeline.from_models`` says."""

    base: Path | None
    given: Mapping[str, Path]
    left_out: frozenset[str]

    @property
    def names(self) -> frozenset[str]:
        """All components that are named."""
        return frozenset(self.given) | self.left_out

    def as_given(self) -> dict[str, str | None]:
        """The argument again, as plain data: for settings that make a picture again."""
        base = {} if self.base is None else {BASE: str(self.base)}
        return {**base, **{name: str(path) for name, path in self.given.items()}, **dict.fromkeys(self.left_out)}


def read_sources(components: Components | None) -> ComponentSources:
    """Check the argument. Raises InputError for anything but a path or a mapping to paths."""
    if components is None:
        return ComponentSources(None, {}, frozenset())
    if isinstance(components, str | Path):
        components = {BASE: components}
    if not isinstance(components, Mapping):
        raise InputError(f"components is {components!r}, expected a folder or a mapping from component to path")
    given: dict[str, Path] = {}
    for name, value in components.items():
        if value == "" or not isinstance(value, str | Path | None):
            raise InputError(f"components[{name!r}] is {value!r}, expected a folder, a file, or None to leave it out")
        if value is not None:
            given[name] = Path(value).expanduser()
    left_out = frozenset(name for name, value in components.items() if value is None)
    if BASE in left_out:
        raise InputError(f"components[{BASE!r}] is None; leave it out of the mapping instead")
    return ComponentSources(given.pop(BASE, None), given, left_out)
