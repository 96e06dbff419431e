"""Groups over gloo: every exchange against what it is defined to give, and what a lost rank does."""

from __future__ import annotations

import time

import pytest
import torch

from kdit.parallel.grid import GridMesh
from kdit.parallel.group import Group
from kdit.parallel.world import World
from tests.parallel.pool import RankError, pool

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def own(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(24, dtype=torch.float32).reshape(4, 3, 2) + 100 * rank).to(dtype)


def exchanges(world: World, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    group = GridMesh(world, {"tp": world.size}).group("tp")
    x = own(group.rank, dtype)
    assert (group.size, group.rank) == (world.size, world.rank)
    return {
        "reduce": group.all_reduce(x[:2].clone()),
        "gather": group.all_gather(x, dim=1),
        "to_all": group.all_to_all(x[: world.size].transpose(1, 2)),
        "shift": group.start_shift(x).wait(),
        "broadcast": group.broadcast(x.clone()),
        "all_true": group.all_true(torch.tensor([True, world.rank != 1])),
    }


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_exchanges_give_what_they_are_defined_to_give(size: int, dtype: torch.dtype) -> None:
    every = [own(rank, dtype) for rank in range(size)]
    for rank, found in enumerate(pool(size).run(exchanges, dtype)):
        assert isinstance(found, dict)
        assert torch.allclose(found["reduce"].float(), sum(x[:2].float() for x in every), rtol=0.01)
        assert found["gather"].equal(torch.cat(every, dim=1))
        assert found["to_all"].equal(torch.stack([x[rank].T for x in every]))
        assert found["shift"].equal(every[rank - 1])
        assert found["broadcast"].equal(every[0])
        assert found["all_true"].tolist() == [True, False]


def members(world: World, sizes: dict[str, int], axes: tuple[str, ...]) -> list[int]:
    mesh = GridMesh(world, sizes)
    assert mesh.group(*axes) is mesh.group(*reversed(axes))
    return mesh.group(*axes).all_gather(torch.tensor([world.rank]), dim=0).tolist()


def test_axes_stand_in_the_stated_order() -> None:
    sizes = {"ring": 2, "tp": 2}
    assert pool(4).run(members, sizes, ("tp",)) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert pool(4).run(members, sizes, ("ring",)) == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert pool(4).run(members, sizes, ("ulysses",)) == [[0], [1], [2], [3]]
    assert pool(4).run(members, sizes, ("tp", "ring")) == [[0, 1, 2, 3]] * 4


def sent_bytes(world: World) -> int:
    group = GridMesh(world, {"tp": world.size}).group("tp")
    group.all_to_all(torch.zeros(world.size, 10))
    return world.sent.pop("tp")


def test_what_a_rank_keeps_is_not_counted_as_sent() -> None:
    assert pool(2).run(sent_bytes) == [40, 40]


def leave(world: World) -> float:
    group = GridMesh(world, {"tp": world.size}).group("tp")
    group.all_reduce(torch.ones(1))
    if world.rank == 1:
        world.drop()
        raise ValueError("the first cause")
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        group.all_reduce(torch.ones(1))
    return time.monotonic() - started


def test_a_rank_that_drops_its_groups_ends_the_waits_of_others_and_new_groups_work() -> None:
    for _ in range(3):
        with pytest.raises(RankError) as caught:
            pool(3).run(leave)
        assert "the first cause" in str(caught.value)
        assert str(caught.value).count("Traceback") == 1, "another rank did not end, or ended with another error"
        assert pool(3).run(members, {"tp": 3}, ("tp",)) == [[0, 1, 2]] * 3


def test_a_group_of_one_returns_its_input() -> None:
    group, x = Group(), torch.arange(6.0).reshape(1, 2, 3)
    assert (group.size, group.rank) == (1, 0)
    for same in (
        group.all_reduce(x), group.broadcast(x), group.all_gather(x, dim=1), group.all_to_all(x),
        group.start_shift(x).wait(), group.all_true(x),
    ):  # fmt: skip
        assert same is x
