"""The numbers of `kdit bench compare` as a small table. Called by bench/command.py."""

from __future__ import annotations

from collections.abc import Mapping

from kdit.cli.bench.clock import STAGES

ROWS = (*((stage, "s") for stage in STAGES), ("load", "s"), ("load_touch", "s"), ("first_picture", "s"))
MIB = 1 << 20


def render(numbers: Mapping[str, object]) -> str:
    """A line about what ran where, the table, and what holds it up."""
    width, height = _pair(numbers["call.size"])
    frames = f", {numbers['call.frames']} frames" if numbers["call.frames"] else ""
    lines = [
        f"{numbers['model']}, {numbers['call.pipeline']}, {numbers['dtype']}: {width}x{height}{frames},"
        f" {numbers['call.steps']} steps, cfg {numbers['call.cfg_scale']:g}",
        f"{numbers['machine.cpu']}, {numbers['machine.threads']} of {numbers['machine.cores']} cores,"
        f" features {_names(numbers['machine.features'])};"
        f" torch {numbers['machine.torch']}, diffusers {numbers['machine.diffusers']}"
        + (f", commit {numbers['machine.commit']}" if numbers["machine.commit"] else ""),
        "",
        f"{'median':<16}{'kdit':>12}{'diffusers':>12}{'ratio':>8}   over the rounds",
    ]
    for name, unit in ROWS:
        if f"ratio.{name}" in numbers:
            lines.append(_row(numbers, name, *(f"{_number(numbers, s, name, unit):.3f} s" for s in _SIDES)))
    if "ratio.peak_memory" in numbers:
        values = (f"{_number(numbers, s, 'peak_memory', 'bytes') / MIB:.0f} MiB" for s in _SIDES)
        lines.append(_row(numbers, "peak_memory", *values))
    lines += [
        "",
        f"latents differ by {numbers['difference.latents.relative']:.2g} (relative),"
        f" {numbers['difference.latents.largest']:.2g} at most"
        + ("" if numbers["agree"] else ": NOT THE SAME RESULT, the times mean nothing"),
        f"weights of the transformer in memory during the loop: {numbers['kdit.loop_resident_ratio']:.3f} of all",
    ]
    return "\n".join(lines)


_SIDES = ("kdit", "diffusers")


def _row(numbers: Mapping[str, object], name: str, own: str, reference: str) -> str:
    low, high = (numbers[f"ratio.{name}.{end}"] for end in ("low", "high"))
    return f"{name:<16}{own:>12}{reference:>12}{numbers[f'ratio.{name}']:>8.3f}   {low:.3f} to {high:.3f}"


def _number(numbers: Mapping[str, object], side: str, name: str, unit: str) -> float:
    value = numbers[f"{side}.{name}.median_{unit}"]
    assert isinstance(value, int | float)
    return value


def _pair(value: object) -> tuple[int, int]:
    assert isinstance(value, tuple)
    width, height = value
    return width, height


def _names(value: object) -> str:
    assert isinstance(value, list)
    return " ".join(value) or "none that are asked for"
