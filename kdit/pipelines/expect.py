"""expect: the type check of what callers pass to a Pipeline."""

from __future__ import annotations

from kdit.errors import InputError


def expect(given: object, kind: type | tuple[type, ...]) -> None:
    """``given`` must be a ``kind``, or None where a default stands for it."""
    if given is not None and not isinstance(given, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise InputError(
            f"expected {' or '.join(k.__name__ for k in kinds)}, got {type(given).__name__}: {given!r:.80}"
        )
