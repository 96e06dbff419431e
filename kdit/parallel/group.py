"""Group: the ranks that share one or more axes, and what they can exchange. A group of one returns its input."""

from __future__ import annotations

from torch import Tensor


class Pending:
    """An exchange under way."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        """The result, once it is there."""
        return self._result


class Group:
    """One rank by itself; the base of every process group.

    Networks and caches always hold a group, never None, so that one program text serves any number of ranks. Every
    method but ``size`` and ``rank`` is collective: all ranks of the group call it, in the same order, with
    tensors of equal shape and dtype.
    """

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return 1

    @property
    def rank(self) -> int:
        """Position of this process in the group."""
        return 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of ``x`` over the ranks. May overwrite ``x``."""
        return x

    def all_true(self, flags: Tensor) -> Tensor:
        """Boolean ``flags``: True where every rank says True."""
        return flags

    def broadcast(self, x: Tensor) -> Tensor:
        """``x`` of the group's first rank. May overwrite ``x``."""
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The ranks' tensors joined along ``dim``, in rank order."""
        return x

    def all_to_all(self, x: Tensor) -> Tensor:
        """x [size, ...]: part i goes to rank i; part i of the result came from rank i."""
        return self.start_all_to_all(x).wait()

    def start_all_to_all(self, x: Tensor) -> Pending:
        """``all_to_all`` that runs while the caller computes. ``x`` must not be written to meanwhile."""
        return Pending(x)

    def start_shift(self, x: Tensor) -> Pending:
        """Give ``x`` to the next rank of the ring and get that of the one before."""
        return Pending(x)
