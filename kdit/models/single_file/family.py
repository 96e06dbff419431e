"""SingleFileFamily: what a family declares about single files; the module ``single_file`` of a family states one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple

from kdit.keys import FAMILIES
from kdit.models.single_file.name_rule import NameRule, rename
from kdit.models.weights.header import TensorInfo

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a network's tensors, by diffusers' names."""
Config = dict[str, object]


class PipelineForm(NamedTuple):
    """A diffusers pipeline that a file may be meant for: what model_index.json of its folder would say."""

    class_name: str
    components: Mapping[str, tuple[str, str]]  # beside the network: name -> (library, class)
    options: Mapping[str, bool | int | float | str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class VaeForm:
    """How to recognise a family's autoencoder."""

    class_name: str
    recognise: Callable[[Mapping[str, TensorInfo]], dict[str, TensorInfo] | None]
    """Its tensors under diffusers' names; None if they are of no such autoencoder."""
    config: Callable[[Shapes, Mapping[str, object]], Config]
    """Config from shapes; the second argument is the config of a like one, for what shapes do not tell."""


@dataclass(frozen=True, kw_only=True)
class SingleFileFamily:
    """How to recognise the family's networks, and what no shape tells."""

    title: str
    network_class: str
    stored_marks: tuple[str, ...]  # names that only this family has in its authors' layout
    diffusers_marks: tuple[str, ...]  # and in diffusers' layout
    rules: Callable[[Collection[str]], tuple[NameRule, ...]]
    """The authors' names to diffusers', given all names; of several rules for one name the first counts."""
    config: Callable[[Shapes, Mapping[str, object]], Config]
    """Config from shapes; the second argument is the config of a like network, for what shapes do not tell.
    What neither tells is None there, and one of ``untold``."""
    forms: Callable[[Mapping[str, object], Collection[str]], tuple[PipelineForm, ...]]
    """Pipelines for a network of this config, the likeliest first, given the names of the components supplied."""
    scheduler: Callable[[Mapping[str, object]], Config]
    """The published scheduler_config.json for a network of this config."""
    components: Mapping[str, tuple[str, str]]  # that all its pipelines have beside the network
    vae: VaeForm
    text_parts: Mapping[str, str]  # text encoder in whole checkpoints -> component
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # may be left out, with what goes along
    untold: tuple[str, ...] = ()  # settings that no shape shows if the network is of no published size

    def unknown(self, config: Mapping[str, object]) -> tuple[str, ...]:
        """Settings that ``config`` leaves open, without which there is no network."""
        return tuple(name for name in self.untold if config.get(name) is None)


def families() -> tuple[SingleFileFamily, ...]:
    """The declarations of all families."""
    return tuple(import_module(f"kdit.models.{name}.single_file").SINGLE_FILE for name in FAMILIES)


def recognise_network(
    tensors: Mapping[str, TensorInfo],
) -> tuple[SingleFileFamily, dict[str, TensorInfo]] | None:
    """The family that the names belong to, and the tensors under diffusers' names; None: no family knows them."""
    for family in families():
        if all(mark in tensors for mark in family.stored_marks):
            return family, rename(tensors, family.rules(tensors))
        if all(mark in tensors for mark in family.diffusers_marks):
            return family, rename(tensors, ())
    return None


def num_indices(shapes: Collection[str], prefix: str) -> int:
    """How many blocks there are: of ``prefix``.0., ``prefix``.1. and so on."""
    found = {name[len(prefix) + 1 :].partition(".")[0] for name in shapes if name.startswith(f"{prefix}.")}
    return len({index for index in found if index.isdigit()})
