"""Words of the command line to values. Used by the commands."""

from __future__ import annotations

import os

from kdit.errors import InputError


def parse_size(text: str) -> tuple[int, int]:
    """`WIDTHxHEIGHT` to (width, height). Raises InputError."""
    width, separator, height = text.lower().partition("x")
    if not (separator and width.isdecimal() and height.isdecimal() and int(width) > 0 and int(height) > 0):
        raise InputError(f"--size must be WIDTHxHEIGHT in pixels, for example 1024x768, got {text!r}")
    return int(width), int(height)


def readable_text(text: str, option: str) -> str:
    """A command-line argument as Unicode, also where the locale could not decode it. Raises InputError."""
    try:
        text.encode()
    except UnicodeEncodeError:  # Python keeps undecodable bytes as lone surrogates
        try:
            return os.fsencode(text).decode()
        except UnicodeError:
            raise InputError(f"{option} is not valid UTF-8: {text!a}") from None
    return text
