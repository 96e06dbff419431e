"""OpSet: which implementation each operator uses. Made from ExecuteConfig, held by the networks."""

from __future__ import annotations

from dataclasses import dataclass

from kdit.parallel import Mesh


@dataclass(frozen=True)
class OpSet:
    """Operator choices and the mesh they run on."""

    batch_invariant: bool = False
    mesh: Mesh = Mesh()
