"""Checks of prompt arguments, shared by Pipeline and the families' context builders."""

from __future__ import annotations

from collections.abc import Sequence

from kdit.errors import InputError


def prompt_list(prompt: str | Sequence[str], name: str = "prompt") -> tuple[str, ...]:
    """One string or a non-empty list of strings. Raises InputError on anything else."""
    if not isinstance(prompt, str | list | tuple):
        raise InputError(f"`{name}` must be a string or a list of strings, got {type(prompt).__name__}")
    texts = (prompt,) if isinstance(prompt, str) else tuple(prompt)
    if not texts:
        raise InputError(f"`{name}` is an empty list; give at least one")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"`{name}`[{i}] must be a string, got {type(text).__name__}")
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise InputError(f"`{name}`[{i}] is not valid Unicode: it holds half of a surrogate pair: {text[:40]!a}")
    return texts


def per_sample(given: str | Sequence[str], num_samples: int, name: str) -> tuple[str, ...]:
    """One text per sample: a single string serves all."""
    texts = prompt_list(given, name)
    if isinstance(given, str):
        return texts * num_samples
    if len(texts) != num_samples:
        raise InputError(
            f"`{name}` has {len(texts)} entries for {num_samples} prompts; give one for all, or one for each"
        )
    return texts


def other_texts(given: str | Sequence[str] | None, texts: tuple[str, ...], name: str) -> tuple[str, ...]:
    """What a further encoder reads: ``given`` where the caller gave it, else the same ``texts``."""
    return texts if given is None else per_sample(given, len(texts), name)
