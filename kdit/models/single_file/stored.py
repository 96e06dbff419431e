"""read_stored: the tensors of one file, whatever it is called. Pickles and everything else foreign are refused."""

from __future__ import annotations

from pathlib import Path

from kdit.errors import CheckpointError, CheckpointMissingError
from kdit.models.single_file.gguf_file import GGUF_MAGIC, read_gguf
from kdit.models.weights.header import TensorInfo, read_header
from kdit.models.weights.scales import with_scales
from kdit.models.weights.weight_files import raise_first


def read_stored(path: Path) -> dict[str, TensorInfo]:
    """All tensors by their stored names, fp8 weights joined with their scales.

    The format is told by the file's first bytes: nothing but safetensors and GGUF is opened.
    Raises CheckpointError.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except FileNotFoundError as error:
        raise CheckpointMissingError(f"there is no file {path}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if magic == GGUF_MAGIC:
        return read_gguf(path)
    tensors, faults = with_scales(read_header(path))
    raise_first(faults)
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors")
    return tensors
