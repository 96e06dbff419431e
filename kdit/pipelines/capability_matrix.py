"""capability_matrix: which pipeline has which option, from the code's own declarations. ``kdit models`` and the
documents print it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from typing import NamedTuple, NoReturn, get_args

from kdit.generators.capabilities import Capabilities
from kdit.generators.registry import generator_def
from kdit.keys import FAMILIES, ModelKind, TensorKey
from kdit.pipelines.extra_inputs import MediaInputs
from kdit.pipelines.family_pipeline import FamilyPipeline, never
from kdit.pipelines.options import NETWORK_OPTIONS, Group, NetworkOption

MEDIA_OPTIONS = {item.name: f"--{item.name.rstrip('s').replace('_', '-')}" for item in fields(MediaInputs)}
"""The fields of MediaInputs by the option of ``kdit generate`` that fills them."""
FED = (TensorKey.POSITIVE, TensorKey.NEGATIVE, TensorKey.NOISE)


class PipelineOption(NamedTuple):
    """One column of the matrix."""

    name: str
    group: Group
    has: Callable[[FamilyPipeline, Capabilities], bool]


class PipelineRow(NamedTuple):
    """One pipeline and what it has, by the names of the options."""

    pipeline: str
    family: str
    title: str
    folders: tuple[str, ...]  # classes of folders that it runs
    makes: str
    options: dict[str, bool]


def _takes(field: str) -> Callable[[FamilyPipeline, Capabilities], bool]:
    return lambda pipeline, _: field in _taken_media(pipeline)


def _reads(key: TensorKey) -> Callable[[FamilyPipeline, Capabilities], bool]:
    return lambda _, declared: key in declared.inputs


def _of_network(option: NetworkOption) -> Callable[[FamilyPipeline, Capabilities], bool]:
    return lambda _, declared: option.has(declared)


def _pipeline_options() -> tuple[PipelineOption, ...]:
    return (
        *(PipelineOption(flag, "inputs", _takes(field)) for field, flag in MEDIA_OPTIONS.items()),
        PipelineOption("strength", "inputs", lambda p, c: c.image_strength and p.changes_image is not never),
        *(PipelineOption(f"fed {key.name}", "inputs", _reads(key)) for key in FED),
        PipelineOption("cfg_scale", "guidance", _reads(TensorKey.NEGATIVE)),
        PipelineOption("cfg_scale_2", "guidance", lambda p, _: _num_networks(p) > 1),
        *(PipelineOption(option.name, option.group, _of_network(option)) for option in NETWORK_OPTIONS.values()),
    )


PIPELINE_OPTIONS: tuple[PipelineOption, ...] = _pipeline_options()


def capability_matrix() -> tuple[PipelineRow, ...]:
    """One row per pipeline, in the order of the families."""
    rows = []
    for entry in FAMILIES.values():
        pipelines: tuple[FamilyPipeline, ...] = import_module(f"kdit.pipelines.defs.{entry.name}").PIPELINES
        for pipeline in pipelines:
            capabilities = generator_def(pipeline.network).capabilities
            folders = tuple(name for name, keys in entry.pipelines.items() if pipeline.key in keys)
            options = {option.name: option.has(pipeline, capabilities) for option in PIPELINE_OPTIONS}
            rows.append(PipelineRow(pipeline.key.value, entry.name, entry.title, folders, pipeline.output, options))
    return tuple(rows)


def as_markdown(rows: tuple[PipelineRow, ...]) -> str:
    """The matrix as one table per group of options."""
    parts = [_table(["pipeline", "family", "makes", "folders of"], [_row_head(row) for row in rows])]
    for group in get_args(Group):
        names = [option.name for option in PIPELINE_OPTIONS if option.group == group]
        cells = [[row.pipeline, *("yes" if row.options[name] else "no" for name in names)] for row in rows]
        parts.append(f"## {group.capitalize()}\n\n" + _table(["pipeline", *names], cells))
    return "\n\n".join(parts) + "\n"


def _row_head(row: PipelineRow) -> list[str]:
    return [row.pipeline, row.title, row.makes, ", ".join(row.folders)]


def _table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, rows)])


class _Asked(Exception):
    """Carries out of ``from_media`` what it takes."""

    def __init__(self, taken: tuple[str, ...]) -> None:
        self.taken = taken


class _Question(MediaInputs):
    """Asks a pipeline's ``from_media`` which files it takes: each states them to ``refuse`` first of all."""

    def refuse(self, title: str, *taken: str) -> NoReturn:
        """Nothing is refused; the answer is what was wanted."""
        raise _Asked(taken)


def _taken_media(pipeline: FamilyPipeline) -> tuple[str, ...]:
    if pipeline.from_media is None:
        return ()
    try:
        pipeline.from_media(_Question(images=("asked",)))
    except _Asked as answer:
        return answer.taken
    raise AssertionError(f"from_media of {pipeline.key.value} does not say which files it takes")


def _num_networks(pipeline: FamilyPipeline) -> int:
    return sum(key.kind is ModelKind.NETWORK for key in pipeline.components)
