"""weight_sets: the sets of weight files in a folder, the plain one and variants such as fp16. scan_weights calls it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from kdit.errors import CheckpointError, CheckpointMissingError


@dataclass
class WeightSet:
    """The files of one set, by name; any of the three kinds may be absent."""

    variant: str | None  # None: the plain set
    single: str | None = None
    index: str | None = None
    shards: set[str] = field(default_factory=set)

    @property
    def usable(self) -> bool:
        """Shards alone cannot be read: only the index tells whether they are all."""
        return self.single is not None or self.index is not None


def weight_sets(present: Iterable[str], stem: str) -> dict[str | None, WeightSet]:
    """The sets among the file names of a folder.

    A variant v of ``model.safetensors`` is ``model.v.safetensors``, or ``model.v-00001-of-00002.safetensors`` and so
    on with ``model.safetensors.index.v.json`` (diffusers also writes ``model.safetensors.v.index.json``).
    """
    name = re.escape(stem)
    kinds = {
        "single": rf"{name}(?:\.(?P<v>[\w-]+?))?\.safetensors",
        "shards": rf"{name}(?:\.(?P<v>[\w-]+?))?-\d+-of-\d+\.safetensors",
        "index": rf"{name}\.safetensors\.index(?:\.(?P<v>[\w-]+))?\.json",
        "older index": rf"{name}\.safetensors\.(?P<v>[\w-]+)\.index\.json",
    }
    sets: dict[str | None, WeightSet] = {}
    for file in sorted(present):
        # A shard's name also has the form of a variant "v-00001-of-00002", so shards come first.
        for kind in ("shards", "single", "index", "older index"):
            if match := re.fullmatch(kinds[kind], file):
                found = sets.setdefault(match["v"], WeightSet(match["v"]))
                if kind == "shards":
                    found.shards.add(file)
                elif kind == "single":
                    found.single = file
                else:
                    found.index = found.index or file
                break
    return sets


def choose_set(
    sets: dict[str | None, WeightSet], wanted: str | None, where: str
) -> tuple[WeightSet | None, str | None]:
    """The set to load and what is to be told about the choice; (None, None) if there is nothing to choose from.

    ``wanted`` counts where the folder has it, then the plain set, then a variant that is the only one.
    Raises CheckpointError where several variants are left.
    """
    usable = {variant: found for variant, found in sets.items() if found.usable}
    if wanted is not None and wanted in usable:
        return usable[wanted], None
    if None in usable:
        told = None if wanted is None else f"{where} has no variant {wanted!r}; its plain weights are loaded"
        return usable[None], told
    if len(usable) > 1:
        names = ", ".join(sorted(filter(None, usable)))
        asked = "" if wanted is None else f" and not {wanted!r}, which was asked for"
        raise CheckpointError(f"{where} holds only the variants {names}{asked}; choose one of them with variant=...")
    if usable:
        (only,) = usable.values()
        if wanted is not None:
            raise CheckpointMissingError(f"{where} holds only the variant {only.variant!r}, not {wanted!r}")
        return only, f"{where} holds only the variant {only.variant!r}, which is loaded"
    return None, None
