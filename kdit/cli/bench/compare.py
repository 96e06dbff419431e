"""run_compare: both sides in turn on the same folder, then in processes of their own. Called by bench/command.py."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from kdit.cli.bench.call import BenchCall, check_has_call
from kdit.cli.bench.clock import LOOP, STAGES, Sample
from kdit.cli.bench.fresh import Job, Side, Task, measure
from kdit.cli.bench.machine import machine_description
from kdit.cli.bench.options import BenchOptions
from kdit.cli.bench.ours import PREPARE, OwnSide, effective_call, open_pipeline
from kdit.cli.bench.reference import ReferenceSide
from kdit.cli.bench.shape import BenchShape, read_shape
from kdit.cli.bench.weights import write_model
from kdit.cli.verify.compare import relative_error
from kdit.models.weights.library import quiet

SIDES: tuple[Side, ...] = ("kdit", "diffusers")
LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}
"""Relative distance of the latents above which both sides have not done the same work."""

WARM_UP_STEPS = 2

Numbers = dict[str, object]
Say = Callable[[str], None]


def run_compare(options: BenchOptions, say: Say) -> Numbers:
    """Everything that was measured, with flat keys. Raises what the model or the request deserves."""
    threads_before = torch.get_num_threads()
    threads = options.threads or threads_before
    torch.set_num_threads(threads)
    try:
        with _model_folder(options, say) as (folder, options), _libraries_quiet():
            pipeline = open_pipeline(folder, options.dtype)
            check_has_call(pipeline.checkpoint.pipeline_class)
            call = effective_call(pipeline, options)
            place = str(pipeline.checkpoint.path)
            numbers: Numbers = {
                "model": options.config or options.model,
                "dtype": options.dtype,
                "rounds": options.rounds,
                "fresh": options.fresh,
                **{f"call.{name}": value for name, value in asdict(call).items()},
                **machine_description(threads),
            }
            numbers |= _alternate(folder, place, options, call, say)
            numbers |= _fresh(folder, place, options, replace(call, steps=1), threads, say)
            return numbers
    finally:
        torch.set_num_threads(threads_before)


@contextmanager
def _model_folder(options: BenchOptions, say: Say) -> Iterator[tuple[str, BenchOptions]]:
    """The folder to measure, and the options with the shape's own values where the command line said nothing."""
    if options.config is None:
        assert options.model is not None
        yield options.model, options
        return
    shape = read_shape(options.config)
    options = _with_shape_values(options, shape)
    with tempfile.TemporaryDirectory(prefix="kdit-bench-") as temporary:
        folder = (options.keep or Path(temporary)) / f"{shape.name}-{options.dtype}"
        if folder.exists():
            say(f"using the model in {folder}")
        else:
            say(f"writing {shape.name} in {options.dtype} to {folder}")
            folder.parent.mkdir(parents=True, exist_ok=True)
            building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".writing-"))
            try:
                write_model(shape, building / folder.name, options.dtype)
                (building / folder.name).rename(folder)
            finally:
                shutil.rmtree(building)
        yield str(folder), options


def _with_shape_values(options: BenchOptions, shape: BenchShape) -> BenchOptions:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in shape.run.items()}
    given = {name: value for name, value in values.items() if getattr(options, name) is None}
    return replace(options, **given)  # type: ignore[arg-type]


@contextmanager
def _libraries_quiet() -> Iterator[None]:
    with quiet("diffusers"), quiet("transformers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- in this process


def _alternate(folder: str, place: str, options: BenchOptions, call: BenchCall, say: Say) -> Numbers:
    """Rounds of both sides in turn: AB, BA, AB ... after one short request of each that does not count."""
    say("loading both sides")
    own = OwnSide(folder, options.dtype)
    reference = ReferenceSide(Path(place), call.pipeline, options.dtype)
    say("warming up")
    warm_up = replace(call, steps=min(call.steps, WARM_UP_STEPS))
    own.run(warm_up, look=True)
    reference.run(warm_up)
    runs: dict[Side, Callable[[], Sample]] = {"kdit": lambda: own.run(call), "diffusers": lambda: reference.run(call)}
    times: dict[Side, list[Mapping[str, float]]] = {side: [] for side in SIDES}
    last: dict[Side, Sample] = {}
    for i in range(options.rounds):
        for side in SIDES if i % 2 == 0 else SIDES[::-1]:
            last[side] = runs[side]()
            times[side].append(last[side].seconds)
        say(f"round {i + 1} of {options.rounds}: " + ", ".join(f"{s} {times[s][-1][LOOP]:.3f} s" for s in SIDES))
    numbers: Numbers = {}
    for side in SIDES:
        for stage in (*STAGES, PREPARE) if side == "kdit" else STAGES:
            numbers |= _spread(f"{side}.{stage}", "s", [seconds[stage] for seconds in times[side]])
    for stage in STAGES:
        numbers |= _ratio(stage, *([seconds[stage] for seconds in times[side]] for side in SIDES))
    assert own.resident is not None, "a loop has a step"
    resident, whole = own.resident
    own.pipeline.close()
    latents, expected = (last[side].latents for side in SIDES)
    return {
        **numbers,
        **_difference("latents", latents, expected),
        **_difference("pixels", *(last[side].pixels for side in SIDES)),
        "agree": relative_error(latents, expected) <= LARGEST_DIFFERENCE[options.dtype],
        "kdit.loop_resident_bytes": resident,
        "kdit.transformer_bytes": whole,
        "kdit.loop_resident_ratio": resident / whole,
    }


def _difference(what: str, got: Tensor, expected: Tensor) -> Numbers:
    return {
        f"difference.{what}.relative": relative_error(got, expected),
        f"difference.{what}.largest": float((got.double() - expected.double()).abs().max()),
    }


# -- in fresh processes


def _fresh(folder: str, place: str, options: BenchOptions, call: BenchCall, threads: int, say: Say) -> Numbers:
    """Processes of both sides in turn; the files are in the system's cache from the measurement before."""
    found: dict[tuple[Side, str], list[float]] = {}
    tasks: tuple[Task, ...] = ("load", "picture")
    with tempfile.TemporaryDirectory(prefix="kdit-bench-") as temporary:
        for i in range(options.fresh):
            say(f"fresh processes {i + 1} of {options.fresh}")
            for task in tasks:
                for side in SIDES if i % 2 == 0 else SIDES[::-1]:
                    job = Job(
                        side=side,
                        task=task,
                        model=folder if side == "kdit" else place,
                        dtype=options.dtype,
                        threads=threads,
                        output=str(Path(temporary) / f"{side}.png"),
                        call=call,
                    )
                    for name, value in measure(job).items():
                        found.setdefault((side, name), []).append(value)
    numbers: Numbers = {}
    for (side, name), values in found.items():
        numbers |= _spread(f"{side}.{name}", "bytes" if name == "peak_memory" else "s", values)
    for name in dict.fromkeys(name for _, name in found):
        numbers |= _ratio(name, found["kdit", name], found["diffusers", name])
    return numbers


def _spread(name: str, unit: str, values: list[float]) -> Numbers:
    return {f"{name}.median_{unit}": statistics.median(values), f"{name}.all_{unit}": values}


def _ratio(name: str, own: list[float], reference: list[float]) -> Numbers:
    """kdit / diffusers: of the medians, and the extremes over the rounds."""
    each = [a / b for a, b in zip(own, reference, strict=True)]
    return {
        f"ratio.{name}": statistics.median(own) / statistics.median(reference),
        f"ratio.{name}.low": min(each),
        f"ratio.{name}.high": max(each),
    }
