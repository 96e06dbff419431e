"""GridMesh: a mesh of several ranks. Apart from mesh.py, which one process alone needs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod

from kdit.parallel.group import Group
from kdit.parallel.mesh import AXES, Mesh
from kdit.parallel.world import World


class GridMesh(Mesh):
    """The ranks of ``world`` on a grid whose axes have the given ``sizes``; those not named have size 1."""

    def __init__(self, world: World, sizes: Mapping[str, int]) -> None:
        self._sizes = tuple(sizes.get(axis, 1) for axis in AXES)
        assert not sizes.keys() - set(AXES), f"no such axes: {sizes}"
        assert prod(self._sizes) == world.size, f"{sizes} on {world.size} ranks"
        self._world = world
        self._groups: dict[frozenset[str], Group] = {}

    def group(self, *axes: str) -> Group:
        """See Mesh. The same group each time."""
        super().group(*axes)
        wanted = frozenset(axes)
        if wanted not in self._groups:
            self._groups[wanted] = self._world.group(self._members(wanted), "x".join(a for a in AXES if a in wanted))
        return self._groups[wanted]

    def _members(self, axes: frozenset[str]) -> list[int]:
        own = _coordinates(self._world.rank, self._sizes)
        choices = (
            range(size) if axis in axes else (at,) for axis, size, at in zip(AXES, self._sizes, own, strict=True)
        )
        return [_rank(at, self._sizes) for at in product(*choices)]


def _coordinates(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for size in reversed(sizes):
        rank, at = divmod(rank, size)
        found.append(at)
    return tuple(reversed(found))


def _rank(coordinates: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    rank = 0
    for at, size in zip(coordinates, sizes, strict=True):
        rank = rank * size + at
    return rank
