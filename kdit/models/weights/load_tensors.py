"""load_tensors: makes the tensors of a model from placements, mapped where they can be used as they lie in a file,
copied where not. ``load_network`` and whoever loads a part of a network later call it.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor

from kdit.errors import CheckpointError
from kdit.models.weights.header import TensorInfo
from kdit.models.weights.plan import Placement
from kdit.models.weights.recipe import Derived, read_tensor

MAPPED_FROM = 1 << 20  # bytes; smaller tensors are copied, so that they do not keep a file mapped for nothing
HUGE_FROM = 1 << 22  # bytes of a new tensor that is worth large pages
PIECE = 1 << 22  # bytes that are read at once: fits in the cache while it is converted
MAX_THREADS = 4
_HAS_PREADV = hasattr(os, "preadv")

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Wanted(NamedTuple):
    """What a tensor is to be."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def load_tensors(
    wanted: Mapping[str, Wanted], placements: Sequence[Placement], device: torch.device
) -> dict[str, Tensor]:
    """The ``wanted`` tensors on ``device``; ``placements`` fill each of them completely.

    A large tensor that one stored tensor is, in the same dtype and on the CPU, is a view of the file's pages: it
    costs no copy, and no memory that the system could not take back. Writing to it does not reach the file, and
    the file must not be rewritten in place while the tensor lives. Everything else is allocated once, at its final
    size, and read into by several threads. Raises CheckpointError.
    """
    sources: defaultdict[str, list[Placement]] = defaultdict(list)
    for placement in placements:
        sources[placement.target].append(placement)
    tensors: dict[str, Tensor] = {}
    jobs: list[Callable[[], None]] = []
    with _OpenFiles() as files:
        for name, (shape, dtype) in wanted.items():
            assert sources[name], f"nothing fills {name}"
            lone = sources[name][0].source if len(sources[name]) == 1 else None
            view = None if lone is None or device.type != "cpu" else files.usable_view(lone, shape, dtype)
            tensors[name] = allocate(shape, dtype, device) if view is None else view
            if view is None:
                jobs += [job for placement in sources[name] for job in files.copies(placement, tensors[name])]
        _run(jobs)
    return tensors


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor. Large ones on a CPU get large pages where the system has them: touching memory for
    the first time is most of the cost of loading, and with small pages four times as much.
    """
    empty = torch.empty(shape, dtype=dtype, device="meta")
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux
    if device.type != "cpu" or advice is None or empty.nbytes < HUGE_FROM:
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, empty.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        pages.madvise(advice)
    except OSError:  # a kernel without them
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class _OpenFiles:
    """The files of one ``load_tensors``: each opened and mapped when it is first needed, closed at the end."""

    def __init__(self) -> None:
        self._handles: dict[Path, int] = {}
        self._maps: dict[Path, torch.UntypedStorage] = {}
        self._lock = threading.Lock()

    def usable_view(self, info: TensorInfo, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """The stored tensor itself, if it can be used as it lies in the file and is worth it."""
        stored = _in_one_piece(info)
        if stored is None or _DTYPES.get(stored.dtype) is not dtype or stored.shape != shape:
            return None
        if stored.num_bytes < MAPPED_FROM or stored.start % dtype.itemsize:
            return None
        return self.view(stored)

    def view(self, info: TensorInfo) -> Tensor:
        """A stored tensor, over the file's pages where its place allows it."""
        dtype = _DTYPES.get(info.dtype)
        if dtype is None:
            raise CheckpointError(f"{info.path}: {info.name} has the dtype {info.dtype}, which kdit cannot read")
        if info.start % dtype.itemsize:  # torch wants elements at multiples of their size
            aligned = torch.empty(info.num_bytes, dtype=torch.uint8)
            self._read(info.path, info.start, aligned)
            return aligned.view(dtype).view(info.shape)
        flat = torch.empty(0, dtype=dtype)
        flat.set_(self._map(info), info.start // dtype.itemsize, info.shape)  # type: ignore[call-overload]
        return flat

    def copies(self, placement: Placement, whole: Tensor) -> list[Callable[[], None]]:
        """What has to be done so that ``placement`` is in its slice of ``whole``; parts that may run at once."""
        source, _, dim, offset = placement
        part = whole.narrow(dim, offset, source.shape[dim]) if source.shape else whole
        stored = _in_one_piece(source)
        dtype = None if stored is None else _DTYPES.get(stored.dtype)
        if stored is None or dtype is None or whole.device.type != "cpu" or not source.num_elements:
            return [lambda: _copy(part, read_tensor(source, self.view))]
        rows = part.reshape(1, -1) if part.dim() < 2 else part
        row_bytes = stored.num_bytes // rows.shape[0]
        step = max(1, PIECE // row_bytes)
        return [
            partial(self._copy_rows, stored.path, stored.start + first * row_bytes, dtype, rows[first : first + step])
            for first in range(0, rows.shape[0], step)
        ]

    def _copy_rows(self, path: Path, start: int, dtype: torch.dtype, rows: Tensor) -> None:
        if rows.dtype is dtype and rows.is_contiguous():
            self._read(path, start, rows.view(-1).view(torch.uint8))
            return
        raw = _scratch(rows.numel() * dtype.itemsize)
        self._read(path, start, raw)
        _copy(rows, raw.view(dtype).view(rows.shape))

    def _read(self, path: Path, start: int, into: Tensor) -> None:
        """Fill ``into`` (bytes) from the file."""
        left = into.numpy().data
        handle = self._handle(path)
        try:
            while left:
                piece = left[: 1 << 30]
                count = os.preadv(handle, [piece], start) if _HAS_PREADV else _read_piece(path, piece, start)
                if count == 0:
                    raise CheckpointError(f"{path} became shorter while it was read")
                left, start = left[count:], start + count
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error

    def _handle(self, path: Path) -> int:
        with self._lock:
            if path not in self._handles:
                try:
                    self._handles[path] = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
            return self._handles[path]

    def _map(self, info: TensorInfo) -> torch.UntypedStorage:
        size = os.fstat(self._handle(info.path)).st_size
        if size < info.end:
            raise CheckpointError(f"{info.path} became shorter while it was read: {size} bytes, {info.end} needed")
        with self._lock:
            if info.path not in self._maps:
                mapped = torch.UntypedStorage.from_file(str(info.path), False, size)
                self._maps[info.path] = cast(torch.UntypedStorage, mapped)
            return self._maps[info.path]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles.values():
            os.close(handle)


def _read_piece(path: Path, into: memoryview, start: int) -> int:
    """For systems that cannot read at a position through a handle that threads share."""
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        return file.readinto(into)


def _in_one_piece(info: TensorInfo) -> TensorInfo | None:
    """The entry without its recipe, if its elements are stored as they are from ``start`` to ``end``."""
    recipe = info.recipe
    if recipe is None:
        return info
    if isinstance(recipe, Derived) and recipe.source.recipe is None and (not recipe.spans or len(recipe.spans) == 1):
        return info._replace(recipe=None)
    return None


_thread = threading.local()


def _scratch(num_bytes: int) -> Tensor:
    """Memory of this thread that is overwritten again and again, so that it is touched for the first time once."""
    held: Tensor | None = getattr(_thread, "scratch", None)
    if held is None or held.numel() < num_bytes:
        held = torch.empty(max(num_bytes, PIECE), dtype=torch.uint8)
        _thread.scratch = held
    return held[:num_bytes]


def _copy(target: Tensor, source: Tensor) -> None:
    with torch.no_grad():  # which a thread has for itself
        target.copy_(source)


def _run(jobs: Sequence[Callable[[], None]]) -> None:
    """Run all jobs; the first error ends it."""
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, len(jobs))
    if threads < 2:
        for job in jobs:
            job()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="kdit-load") as pool:
        for future in [pool.submit(job) for job in jobs]:
            future.result()
