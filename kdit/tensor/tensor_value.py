"""TensorValue: what a TensorPool stores under one key."""

from __future__ import annotations

from torch import Tensor

TensorData = Tensor | list[Tensor]


class TensorValue:
    """One tensor or a list of tensors, with a release that drops the references at once.

    A list is copied: what its owner does with it later, or a release here, does not reach the other.
    """

    __slots__ = ("data",)

    def __init__(self, data: TensorData) -> None:
        if isinstance(data, list):
            assert all(isinstance(item, Tensor) for item in data), [type(item).__name__ for item in data]
            self.data: TensorData = list(data)
        else:
            assert isinstance(data, Tensor), type(data).__name__
            self.data = data

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors held, a single one as a tuple of one."""
        return tuple(self.data) if isinstance(self.data, list) else (self.data,)

    def release(self) -> None:
        """Drop the tensors; the value is empty afterwards."""
        self.data = []
