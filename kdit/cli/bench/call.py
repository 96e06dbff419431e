"""BenchCall: one request in plain values, so that a fresh process can make it too. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules

from kdit.cli.bench import families
from kdit.errors import InputError


@dataclass(frozen=True, kw_only=True)
class BenchCall:
    """What both sides are asked for, all defaults filled in."""

    pipeline: str  # the reference library's class
    prompt: str
    negative: str | None  # None: no classifier-free guidance
    steps: int
    cfg_scale: float
    cfg_scale_2: float | None
    guidance_scale: float | None
    max_sequence_length: int
    size: tuple[int, int]  # width, height
    frames: int | None  # None: a picture
    seed: int


def reference_arguments(call: BenchCall) -> dict[str, object]:
    """The arguments of the reference library's pipeline, without the generator and what shapes its output."""
    width, height = call.size
    return {
        "prompt": call.prompt,
        "width": width,
        "height": height,
        "num_inference_steps": call.steps,
        "max_sequence_length": call.max_sequence_length,
        **_family_call(call.pipeline)(call),
    }


def _family_call(pipeline: str) -> Callable[[BenchCall], dict[str, object]]:
    """``CALLS[pipeline]`` of the family module that has it. Raises InputError."""
    known: list[str] = []
    for module in iter_modules(families.__path__):
        calls: dict[str, Callable[[BenchCall], dict[str, object]]]
        calls = import_module(f"{families.__name__}.{module.name}").CALLS
        if pipeline in calls:
            return calls[pipeline]
        known += calls
    raise InputError(f"bench makes its requests from a prompt alone: {', '.join(known)}; got {pipeline}")


def check_has_call(pipeline: str) -> None:
    """Raise InputError if bench cannot call this class of the reference library."""
    _family_call(pipeline)
