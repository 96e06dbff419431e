"""ConfigReader: typed values out of a network's config.json. The families' params classes call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

from kdit.errors import CheckpointError


class ConfigReader:
    """Reads one config; every refusal is a CheckpointError that names the key, what it holds and what it may hold.

    ``defaults``: the values of absent keys, one for every key that is read. Published checkpoints leave out
    keys that the reference's class has a default for. A key that is null is not absent.
    """

    def __init__(self, config: Mapping[str, object], model: str, *, defaults: Mapping[str, object]) -> None:
        self.config, self.model, self.defaults = config, model, defaults

    def refuse(self, key: str, expected: str) -> CheckpointError:
        """The error for a value that cannot be used."""
        absent = "" if key in self.config else " by default (the config has no such key)"
        return CheckpointError(f"{self.model} config: {key} is {self._value(key)!r}{absent}, expected {expected}")

    def _value(self, key: str) -> object:
        assert key in self.defaults, f"{self.model} has no default for {key}"
        return self.config.get(key, self.defaults[key])

    def size(self, key: str) -> int:
        """A positive whole number."""
        value = self._value(key)
        if not _is_int(value) or value < 1:
            raise self.refuse(key, "a positive whole number")
        return value

    def count(self, key: str) -> int:
        """A whole number from 0 up."""
        value = self._value(key)
        if not _is_int(value) or value < 0:
            raise self.refuse(key, "a whole number from 0 up")
        return value

    def optional_size(self, key: str) -> int | None:
        """A positive whole number, or None where the key is null."""
        return None if self._value(key) is None else self.size(key)

    def ints(self, key: str, *, low: int, high: int) -> tuple[int, ...]:
        """A list of whole numbers low <= n < high."""
        value = self._value(key)
        if not isinstance(value, list | tuple) or not all(_is_int(n) and low <= n < high for n in value):
            raise self.refuse(key, f"a list of whole numbers from {low} to {high - 1}")
        return tuple(value)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self._value(key)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def number(self, key: str) -> float:
        """A positive number."""
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.refuse(key, "a positive number")
        return float(value)

    def require(self, key: str, *allowed: object) -> object:
        """One of the values that the network implements."""
        value = self._value(key)
        if value not in allowed:
            raise self.refuse(key, " or ".join(map(repr, allowed)))
        return value


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
