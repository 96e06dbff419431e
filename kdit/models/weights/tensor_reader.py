"""TensorReader: reads the tensors that an entry describes, file by file. Whoever fills a model uses it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from safetensors import safe_open
from torch import Tensor

from kdit.models.weights.header import TensorInfo
from kdit.models.weights.recipe import read_tensor

Opener = Callable[..., safe_open]


class TensorReader:
    """Keeps the file open that was read last, so that reading in file order opens each once.

    What it returns may be a view of the mapped file: copy it before the reader closes, or keep it as it is.
    """

    def __init__(self, opener: Opener = safe_open) -> None:
        self._opener = opener
        self._path: Path | None = None
        self._open = ExitStack()
        self._get: Callable[[str], Tensor] | None = None

    def read(self, info: TensorInfo) -> Tensor:
        """One tensor, made by its recipe if it has one."""
        return read_tensor(info, self._fetch)

    def _fetch(self, info: TensorInfo) -> Tensor:
        assert info.recipe is None, f"{info.name} is not stored as it is"
        if info.path != self._path:
            self.close()
            self._get = self._open.enter_context(self._opener(info.path, framework="pt")).get_tensor
            self._path = info.path
        assert self._get is not None
        return self._get(info.name)

    def close(self) -> None:
        """Close the open file."""
        self._path = self._get = None
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
