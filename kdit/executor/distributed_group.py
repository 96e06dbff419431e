"""DistributedGroupManager: what the ranks of one replica tell each other about a command. Owned by an Executor."""

from __future__ import annotations

from kdit.keys import TensorKey
from kdit.tensor.tensor_value import TensorData


class DistributedGroupManager:
    """One rank by itself; the base of groups over several processes.

    Every method is collective: all ranks of the replica call it, in the same order.
    """

    @property
    def rank_id(self) -> int:
        """Position of this process in its replica."""
        return 0

    @property
    def world_size(self) -> int:
        """Number of ranks of the replica."""
        return 1

    def broadcast_tensors(self, tensors: dict[TensorKey, TensorData] | None) -> dict[TensorKey, TensorData]:
        """What rank 0 passed in, on every rank; the others pass None."""
        assert tensors is not None, "rank 0 has nothing to broadcast"
        return tensors

    def agree(self, error: Exception | None) -> Exception | None:
        """The error of the first rank that passed one, on every rank; None if no rank failed."""
        return error
