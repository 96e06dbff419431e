"""Reads GGUF files through the package ``gguf``: plain numbers as they are, quantised ones decoded while loading."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kdit.errors import CheckpointError
from kdit.models.weights.header import TensorInfo
from kdit.models.weights.recipe import Fetch, Spans

if TYPE_CHECKING:  # headers are read without torch
    import numpy as np
    from gguf import GGUFReader, ReaderTensor
    from torch import Tensor

GGUF_MAGIC = b"GGUF"
_PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # coding -> dtype of torch
_SHAPE_KEY = "comfy.gguf.orig_shape."  # GGUF has four dimensions at most; converters note the shape of a fifth here
_CHUNK_ELEMENTS = 1 << 22  # decoded at once: the decoders of the package make several copies


@dataclass(frozen=True)
class GgufTensor:
    """Where the bytes of a tensor are and how they are coded; its rows lie one behind the other."""

    path: Path
    coding: str
    offset: int
    shape: tuple[int, ...]  # as torch counts: rows first
    num_bytes: int

    def read(self, fetch: Fetch, spans: Spans | None) -> Tensor:
        """Those rows: plain numbers in their own dtype, decoded ones in float32."""
        import torch

        rows = self.shape[0] if self.shape else 1
        pieces = [self._rows(start, stop) for start, stop in (spans or ((0, rows),))]
        tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return tensor.reshape(-1, *self.shape[1:]) if self.shape else tensor.reshape(())

    def _rows(self, start: int, stop: int) -> Tensor:
        """Rows from start to stop, flat."""
        import torch

        row_bytes = self.num_bytes // (self.shape[0] if self.shape else 1)
        data = self._bytes(self.offset + start * row_bytes, (stop - start) * row_bytes)
        if self.coding in _PLAIN:
            return torch.from_numpy(data).view(getattr(torch, _PLAIN[self.coding]))
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        coding = GGMLQuantizationType[self.coding]
        block, block_bytes = GGML_QUANT_SIZES[coding]
        blocks = data.reshape(-1, block_bytes)
        decoded = torch.empty(blocks.shape[0] * block)
        step = max(_CHUNK_ELEMENTS // block, 1)
        for first in range(0, blocks.shape[0], step):
            part = dequantize(blocks[first : first + step], coding).reshape(-1)
            decoded[first * block : first * block + part.size] = torch.from_numpy(part)
        return decoded

    def _bytes(self, offset: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        import numpy as np

        data = np.fromfile(self.path, dtype=np.uint8, count=count, offset=offset)
        if data.size != count:
            raise CheckpointError(f"{self.path} is truncated: {data.size} of {count} bytes at {offset}")
        return data


def read_gguf(path: Path) -> dict[str, TensorInfo]:
    """All tensors of a GGUF file by name; their dtype is the name of the coding.

    Raises CheckpointError for a damaged file, for a coding that ``gguf`` cannot decode, and without ``gguf``.
    """
    reader = _open(path)
    size = path.stat().st_size
    tensors = {tensor.name: _tensor_info(path, reader, tensor, size) for tensor in reader.tensors}
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors")
    _check_codings(path, tensors)
    return tensors


def _open(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise CheckpointError(
            f"{path} is a GGUF file; reading it needs the package gguf: pip install 'kdit[gguf]'"
        ) from error
    try:
        return GGUFReader(path)
    except (ValueError, LookupError, OSError, OverflowError, MemoryError) as error:  # what it raises on damage
        raise CheckpointError(f"{path} is a damaged or truncated GGUF file: {error}") from error


def _tensor_info(path: Path, reader: GGUFReader, tensor: ReaderTensor, size: int) -> TensorInfo:
    shape = tuple(int(n) for n in reversed(tensor.shape.tolist()))
    noted = reader.get_field(f"{_SHAPE_KEY}{tensor.name}")
    if noted is not None:
        shape = tuple(int(n) for n in noted.contents())
    start, num_bytes = int(tensor.data_offset), int(tensor.n_bytes)
    if math.prod(shape) != int(tensor.n_elements):
        raise CheckpointError(
            f"{path}: {tensor.name} has {int(tensor.n_elements)} elements, its shape {list(shape)} needs"
            f" {math.prod(shape)}"
        )
    if start + num_bytes > size:
        raise CheckpointError(
            f"{path} is truncated: {tensor.name} ends at byte {start + num_bytes}, the file has {size}"
        )
    coding = tensor.tensor_type.name
    recipe = GgufTensor(path, coding, start, shape, num_bytes)
    return TensorInfo(tensor.name, coding, shape, path, start, start + num_bytes, recipe)


def _check_codings(path: Path, tensors: dict[str, TensorInfo]) -> None:
    """Every coding must be one that the package decodes, and cut rows whole; tried on one block of zeros."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    for coding in {info.dtype for info in tensors.values()} - _PLAIN.keys():
        of_it = [info for info in tensors.values() if info.dtype == coding]
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[coding]]
        try:
            dequantize(np.zeros((1, block_bytes), np.uint8), GGMLQuantizationType[coding])
        except NotImplementedError as error:
            raise CheckpointError(
                f"{path} holds {len(of_it)} tensors in {coding}, such as {of_it[0].name}, which gguf cannot decode"
            ) from error
        if uneven := [info for info in of_it if info.num_elements % (block * (info.shape[0] if info.shape else 1))]:
            raise CheckpointError(
                f"{path}: {uneven[0].name} {list(uneven[0].shape)} has rows of broken {coding} blocks"
            )
