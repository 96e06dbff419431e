"""OpSet: which implementation each operator uses. Made from ExecuteConfig, held by the networks."""

from __future__ import annotations

from dataclasses import dataclass, field

from kdit.parallel import Mesh


@dataclass(frozen=True)
class OpSet:
    """Operator choices and the mesh they run on.

    ``batch_invariant``: every row is computed by itself. Matrix libraries choose their order of
    summation by the number of rows, and vectorised functions round the end of a chunk differently from its
    middle, so only a product of fixed size is bit-equal in any company.
    """

    batch_invariant: bool = False
    mesh: Mesh = field(default_factory=Mesh)
