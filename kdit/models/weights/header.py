"""Reads and checks safetensors headers. Everything is verified against the file's size, no tensor is read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kdit.errors import CheckpointError, CheckpointMissingError
from kdit.models.weights.sniff import HEAD_BYTES, foreign_content

if TYPE_CHECKING:
    from kdit.models.weights.recipe import Recipe

LENGTH_BYTES = 8  # the file begins with the header's length, little-endian
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip


class TensorInfo(NamedTuple):
    """Where one tensor is: ``start`` and ``end`` count from the file's beginning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    end: int
    recipe: Recipe | None = None  # how it is made from what is stored; None: it is stored as it is

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return self.end - self.start


def read_header(path: Path) -> dict[str, TensorInfo]:
    """All tensors of a safetensors file, by name.

    Raises CheckpointError saying what the file is or how it is damaged, with the size found and the size
    that the header needs.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            length = _header_length(path, head, size)
            file.seek(LENGTH_BYTES)
            raw = file.read(length)
    except FileNotFoundError as error:
        raise CheckpointMissingError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    tensors = _parse(path, raw, LENGTH_BYTES + length)
    _check_layout(path, tensors, LENGTH_BYTES + length, size)
    return {info.name: info for info in tensors}


def _header_length(path: Path, head: bytes, size: int) -> int:
    if size == 0:
        raise CheckpointError(f"{path} is empty (0 bytes), expected a safetensors file")
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    # A short pickle could pass for a length, but not with the brace that every header opens with.
    if head[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{" or length > MAX_HEADER_BYTES:
        if foreign := foreign_content(head):
            raise CheckpointError(f"{path} is {foreign}")
        raise CheckpointError(f"{path} is no safetensors file: it begins with {head[:16]!r}, expected a header")
    if LENGTH_BYTES + length > size:
        raise CheckpointError(
            f"{path} is truncated: its header alone needs {LENGTH_BYTES + length} bytes, the file has {size}"
        )
    return length


def _parse(path: Path, raw: bytes, data_start: int) -> list[TensorInfo]:
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is damaged: {error}") from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ in the safetensors header is not a table of strings")
    return [_tensor_info(path, name, entry, data_start) for name, entry in header.items()]


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands in it twice")
    return table


def _tensor_info(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    where = f"{path}: header entry of {name!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where} is {entry!r}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise CheckpointError(f"{where} has the dtype {dtype!r}; known: {', '.join(BITS)}")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} is damaged: shape {shape!r}, data_offsets {offsets!r}")
    info = TensorInfo(name, dtype, tuple(shape), path, data_start + offsets[0], data_start + offsets[1])
    needed = (info.num_elements * BITS[dtype] + 7) // 8
    if info.num_bytes != needed:
        raise CheckpointError(
            f"{where}: data_offsets span {info.num_bytes} bytes, {dtype} of shape {list(shape)} needs {needed}"
        )
    return info


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_layout(path: Path, tensors: list[TensorInfo], data_start: int, size: int) -> None:
    """The tensors must fill the rest of the file, one behind the other."""
    position = data_start
    for info in sorted(tensors, key=lambda info: (info.start, info.end)):
        if info.start != position:
            what = "overlaps the tensor before it" if info.start < position else "leaves a gap before it"
            raise CheckpointError(f"{path}: {info.name!r} {what}: it starts at byte {info.start}, expected {position}")
        position = info.end
    if position > size:
        raise CheckpointError(f"{path} is truncated: it has {size} bytes, its header needs {position}")
    if position < size:
        raise CheckpointError(f"{path} is too long: it has {size} bytes, its header accounts for {position}")
