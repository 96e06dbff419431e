"""Group: the ranks that share one axis. A group of one computes nothing and returns its input."""

from __future__ import annotations

from torch import Tensor


class Group:
    """One rank by itself; the base of every process group.

    Networks and caches always hold a group, never None, so that one program text serves any number
    of ranks.
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
        """Sum of ``x`` over the ranks."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """``x`` of the group's first rank."""
        return x
