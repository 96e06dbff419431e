"""ExtraInputs: base of the inputs that one family alone has; MediaInputs: files as the command line names them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

from kdit.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ExtraInputs:
    """Subclasses live beside their family's ContextBuilder. Every field has a default, and holds only what
    the user gives: text, paths, numbers. Fields whose names end in ``_path`` or ``_paths`` hold names of files. A list
    holds an entry per sample; in a field ``..._paths`` every sample takes the whole list, unless it is one of lists.
    """

    def given(self) -> dict[str, object]:
        """What is not left at its default, by field."""
        values = ((item, getattr(self, item.name)) for item in fields(self))
        return {item.name: value for item, value in values if value != item.default}

    def of_sample(self, index: int, num_samples: int) -> dict[str, object]:
        """What is given for one sample of several, by field."""

        given = self.given()
        if num_samples > 1:
            given |= {name: values[index] for name, values in self._lists().items()}
        return given

    def repeated(self, times: int, num_prompts: int) -> Self:
        """The same for ``times`` samples of each prompt, one after the other."""
        lists = {name: values for name, values in self._lists().items() if len(values) == num_prompts}
        return replace(self, **{name: [v for v in values for _ in range(times)] for name, values in lists.items()})

    def _lists(self) -> dict[str, list[object]]:
        """The fields with an entry per sample."""
        lists = {name: value for name, value in self.given().items() if isinstance(value, list)}
        return {n: v for n, v in lists.items() if not n.endswith("_paths") or any(isinstance(e, list) for e in v)}

    def files(self) -> tuple[str, ...]:
        """Every file that is named, each once."""
        return files_of(self.given())


@dataclass(frozen=True, kw_only=True)
class MediaInputs:
    """Input files in the words that all families share. A family makes its own ExtraInputs of them."""

    images: tuple[str, ...] = ()
    mask: str | None = None
    control: str | None = None
    last_image: str | None = None

    def refuse(self, title: str, *taken: str) -> None:
        """Raise InputError for a field that is given and that ``title`` does not take."""
        given = [item.name for item in fields(self) if getattr(self, item.name)]
        if left := [name for name in given if name not in taken]:
            raise InputError(f"{title} takes no {_named(left)}; it takes {_named(taken) or 'text only'}")


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def files_of(given: Mapping[str, object]) -> tuple[str, ...]:
    """Every file that these fields name, each once."""
    named = (value for name, value in given.items() if name.endswith(("_path", "_paths")))
    return tuple(dict.fromkeys(path for value in named for path in _paths(value)))


def _paths(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _paths(item)
