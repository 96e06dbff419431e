"""ConfigReader: typed values out of a network's config.json. The families' params classes call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

from kdit.errors import CheckpointError


class ConfigReader:
    """Reads one config; every refusal is a CheckpointError that names the key, what it holds and what it may hold."""

    def __init__(self, config: Mapping[str, object], model: str) -> None:
        self.config, self.model = config, model

    def refuse(self, key: str, expected: str) -> CheckpointError:
        """The error for a value that cannot be used."""
        if key not in self.config:
            held = ", ".join(sorted(self.config)) or "nothing"
            return CheckpointError(f"{self.model} config has no {key!r}, expected {expected}; it holds {held}")
        return CheckpointError(f"{self.model} config: {key} is {self.config[key]!r}, expected {expected}")

    def size(self, key: str) -> int:
        """A positive whole number."""
        value = self.config.get(key)
        if not _is_int(value) or value < 1:
            raise self.refuse(key, "a positive whole number")
        return value

    def optional_size(self, key: str) -> int | None:
        """A positive whole number, or None where the key is absent or null."""
        return None if self.config.get(key) is None else self.size(key)

    def ints(self, key: str, *, low: int, high: int) -> tuple[int, ...]:
        """A list of whole numbers low <= n < high; empty where the key is absent."""
        value = self.config.get(key, ())
        if not isinstance(value, list | tuple) or not all(_is_int(n) and low <= n < high for n in value):
            raise self.refuse(key, f"a list of whole numbers from {low} to {high - 1}")
        return tuple(value)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.config.get(key)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def number(self, key: str) -> float:
        """A positive number."""
        value = self.config.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.refuse(key, "a positive number")
        return float(value)

    def require(self, key: str, *allowed: object) -> object:
        """One of the values that the network implements; an absent key counts as None."""
        value = self.config.get(key)
        if value not in allowed:
            raise self.refuse(key, " or ".join(map(repr, allowed)))
        return value


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
