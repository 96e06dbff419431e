"""Groups of ranks by axis name, and what is communicated in them."""

from kdit.parallel.group import Group
from kdit.parallel.mesh import Mesh

__all__ = ["Group", "Mesh"]
