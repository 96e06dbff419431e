"""Reads NodeContext.metadata into a node's own dataclass, once per call."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, TypeVar

from kdit.errors import ConfigError
from kdit.nodes.core.node_context import NodeContext

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    SettingsT = TypeVar("SettingsT", bound=DataclassInstance)
else:
    SettingsT = TypeVar("SettingsT")


def read_metadata(settings_class: type[SettingsT], context: NodeContext) -> SettingsT:
    """``settings_class`` filled from ``context.metadata``; an unknown or missing name raises ConfigError."""
    declared = {item.name: item for item in fields(settings_class)}
    unknown = [name for name in context.metadata if name not in declared]
    missing = [
        name
        for name, item in declared.items()
        if name not in context.metadata and item.default is MISSING and item.default_factory is MISSING
    ]
    for what, names in (("unknown", unknown), ("missing", missing)):
        if names:
            raise ConfigError(
                f"{settings_class.__name__}: {what} metadata {', '.join(map(repr, names))}; "
                f"the node reads {', '.join(declared)}"
            )
    return settings_class(**context.metadata)
