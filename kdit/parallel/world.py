"""World: the connections of one rank to others. Made once per process by whoever starts it; meshes take its groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from kdit.parallel.group import Group, Pending

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class World:
    """Rank ``rank`` of ``size``, which meet through ``store``.

    Process groups are made when they are first used, so all their ranks must use them in the same order. After a
    failure ``renew`` forgets them all: an exchange that was cut short leaves a group in no known state. A rank that
    drops its groups closes their connections, which ends the exchanges that other ranks wait in.
    """

    def __init__(self, store: Store, rank: int, size: int, *, device: torch.device, timeout: timedelta) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._store, self._timeout = store, timeout
        self._generation = 0
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.sent: Counter[str] = Counter()  # bytes that this rank has sent, by the group's name

    def group(self, ranks: Sequence[int], name: str) -> Group:
        """The group of these ranks, this one among them. ``name``: of its traffic in ``sent``."""
        members = tuple(ranks)
        assert self.rank in members and len(set(members)) == len(members), (self.rank, members)
        return Group() if len(members) == 1 else ProcessGroup(self, members, name)

    def drop(self) -> None:
        """Close the connections of all groups; exchanges under way fail on the other ranks."""
        for group in self._groups.values():
            if self.device.type == "cuda":
                group.abort()
        self._groups.clear()

    def renew(self, generation: int) -> None:
        """Forget all groups; the next ones are those of ``generation``, which must be the same number on all ranks."""
        self.drop()
        self._generation = generation

    def connected(self, members: tuple[int, ...]) -> dist.ProcessGroup:
        """The process group of these ranks, made now if it is not there."""
        if members not in self._groups:
            name = "kdit." + ".".join(map(str, (self._generation, *members)))
            store = PrefixStore(name, self._store)
            self._groups[members] = _process_group(
                store, members.index(self.rank), len(members), self.device, self._timeout
            )
        return self._groups[members]


def _process_group(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return cast(dist.ProcessGroup, dist.ProcessGroupNCCL(store, rank, size, options))
    return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, size, timeout))


class _Exchange(Pending):
    """An exchange that a backend runs. Holds what it reads until it has ended."""

    def __init__(self, work: dist.Work, result: Tensor, source: Tensor) -> None:
        super().__init__(result)
        self._work: dist.Work | None = work
        self._source: Tensor | None = source

    def wait(self) -> Tensor:
        """Blocks until this rank's part is done. Raises RuntimeError if another rank went away."""
        if self._work is not None:
            self._work.wait()
            self._work = self._source = None
        return self._result


class ProcessGroup(Group):
    """Several ranks. Bytes that this rank sends are counted in ``World.sent`` under the group's name."""

    def __init__(self, world: World, members: tuple[int, ...], name: str) -> None:
        self._world, self._members, self._name = world, members, name
        self._rank = members.index(world.rank)

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self._members)

    @property
    def rank(self) -> int:
        """Position of this process in the group."""
        return self._rank

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Group. A ring sends each element twice, less what a rank keeps."""
        x = x.contiguous()
        self._count(2 * x.nbytes * (self.size - 1) // self.size)
        self._backend().allreduce([x]).wait()
        return x

    def all_true(self, flags: Tensor) -> Tensor:
        """See Group."""
        options = dist.AllreduceOptions()
        options.reduceOp = cast(dist.ReduceOp, dist.ReduceOp.MIN)
        numbers = flags.to(torch.uint8)
        self._count(2 * numbers.nbytes * (self.size - 1) // self.size)
        self._backend().allreduce([numbers], options).wait()
        return numbers.bool()

    def broadcast(self, x: Tensor) -> Tensor:
        """See Group."""
        x = x.contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if self._rank == 0:
            self._count(x.nbytes * (self.size - 1))
        self._backend().broadcast([_bytes(x)], options).wait()
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """See Group."""
        x = x.contiguous()
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        self._count(x.nbytes * (self.size - 1))
        self._backend()._allgather_base(_bytes(out), _bytes(x)).wait()
        return torch.cat(out.unbind(0), dim=dim)

    def start_all_to_all(self, x: Tensor) -> Pending:
        """See Group."""
        assert x.shape[0] == self.size, (x.shape, self.size)
        x = x.contiguous()
        out = torch.empty_like(x)
        self._count(x.nbytes * (self.size - 1) // self.size)
        return _Exchange(self._backend().alltoall_base(_bytes(out), _bytes(x), [], []), out, x)

    def start_shift(self, x: Tensor) -> Pending:
        """See Group."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._count(x.nbytes)
        to, of = [0] * self.size, [0] * self.size
        to[(self._rank + 1) % self.size] = of[(self._rank - 1) % self.size] = x.nbytes
        return _Exchange(self._backend().alltoall_base(_bytes(out), _bytes(x), of, to), out, x)

    def _backend(self) -> dist.ProcessGroup:
        return self._world.connected(self._members)

    def _count(self, num_bytes: int) -> None:
        self._world.sent[self._name] += num_bytes


def _bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor: what is only moved needs no support for its dtype."""
    return x.view(-1).view(torch.uint8)
