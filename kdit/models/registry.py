"""Finds a network class by the class name that a checkpoint's config states."""

from __future__ import annotations

from importlib import import_module

from kdit.errors import CheckpointError
from kdit.keys import FAMILIES
from kdit.models.network import Network


def network_class(class_name: str, where: str) -> type[Network]:
    """The network for ``_class_name`` of a transformer's config.json; ``where`` names the file in errors.

    The module ``kdit.models.<family>.network`` states its class as ``NETWORK``.
    """
    for entry in FAMILIES.values():
        if class_name in entry.network_classes:
            found: type[Network] = import_module(f"kdit.models.{entry.name}.network").NETWORK
            return found
    known = [name for entry in FAMILIES.values() for name in entry.network_classes]
    raise CheckpointError(f"{where}: _class_name is {class_name!r}; kdit has networks for {', '.join(known)}")
