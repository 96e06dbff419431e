"""Reads the JSON files of a checkpoint, with errors that say what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

from kdit.errors import CheckpointError, CheckpointMissingError
from kdit.models.weights.sniff import HEAD_BYTES, foreign_content


def read_bytes(path: Path) -> bytes:
    """The whole file; raises CheckpointMissingError or CheckpointError with the path."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointMissingError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in ``path``; raises CheckpointMissingError or CheckpointError."""
    data = read_bytes(path)
    if not data:
        raise CheckpointError(f"{path} is empty (0 bytes), expected a JSON object")
    if foreign := foreign_content(data[:HEAD_BYTES]):
        raise CheckpointError(f"{path} is {foreign}")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:  # both decoding errors are ValueErrors
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value
