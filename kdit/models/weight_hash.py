"""weight_hash: one fingerprint of all weights of a checkpoint, so that a remake notices another model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from kdit.errors import CheckpointError

MEBIBYTE = 1 << 20
WHOLE_FILE_LIMIT = 64 * MEBIBYTE
NUM_BLOCKS = 64
_LENGTH_BYTES = 8
_GGUF_MAGIC = b"GGUF"


def weight_hash(files: Iterable[tuple[str, Path]]) -> str:
    """SHA-256 (hex) over each file's name, size and content, in the order of the names.

    ``files``: (name relative to the checkpoint, path). A file of up to 64 MiB counts whole. Of a larger one
    count its header and 64 blocks of 1 MiB, evenly spaced from the first byte of the data to the last:
    the cost is the same for any size, and whatever trains a model moves weights everywhere. It is no
    protection against somebody who changes single weights on purpose.
    """
    digest = hashlib.sha256()
    for name, path in sorted(files):
        try:
            _add_file(digest.update, name, path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def block_starts(data_start: int, size: int) -> list[int]:
    """Where the blocks of a large file begin: the first at ``data_start``, the last ends with the file."""
    span = max(size - MEBIBYTE - data_start, 0)
    return [data_start + span * i // (NUM_BLOCKS - 1) for i in range(NUM_BLOCKS)]


def _add_file(update: Callable[[bytes], object], name: str, path: Path) -> None:
    size = path.stat().st_size
    encoded = name.encode()
    update(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded + size.to_bytes(_LENGTH_BYTES, "little"))
    with path.open("rb") as file:
        if size <= WHOLE_FILE_LIMIT:
            while block := file.read(MEBIBYTE):
                update(block)
            return
        length = file.read(_LENGTH_BYTES)  # of a safetensors header; any other file counts by its blocks alone
        header = 0 if length.startswith(_GGUF_MAGIC) else int.from_bytes(length, "little")
        data_start = min(_LENGTH_BYTES + header, size)
        update(length + file.read(data_start - _LENGTH_BYTES))
        for start in block_starts(data_start, size):
            file.seek(start)
            update(file.read(MEBIBYTE))
