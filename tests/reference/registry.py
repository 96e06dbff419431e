"""Families and their cases, by name; ``tests.reference.families`` fills the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Case:
    """One call. ``call`` holds the pipeline arguments with Picture/Clip/Noise/Reference stand-ins;
    ``seed`` becomes ``generator=torch.Generator("cpu").manual_seed(seed)``."""

    name: str
    call: dict[str, Any]
    seed: int = 0
    note: str = ""


@dataclass
class Family:
    name: str
    build: Callable[[int], Any]
    pipeline: str
    cases: list[Case]
    denoisers: tuple[str, ...] = ("transformer",)
    latent_output: bool = True
    modular: bool = False
    note: str = ""


FAMILIES: dict[str, Family] = {}


def family(pipeline: str, cases: list[Case], **options: Any) -> Callable:
    """Register the decorated builder ``build(seed) -> pipeline`` under its function name."""

    def register(build: Callable[[int], Any]) -> Callable[[int], Any]:
        FAMILIES[build.__name__] = Family(build.__name__, build, pipeline, cases, **options)
        return build

    return register
