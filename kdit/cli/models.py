"""`kdit models`: the capability matrix as tables or JSON, and the document that is made from it."""

from __future__ import annotations

from typing import TypedDict

from kdit.pipelines.capability_matrix import PIPELINE_OPTIONS, PipelineRow, as_markdown, capability_matrix

DOCUMENT_HEAD = """# What each pipeline supports

Written by `make docs` from the declarations in the code; `kdit models` prints the same. Whatever stands here as "no" is
refused before any weight is loaded, with the names of the families that have it.

"""


class PipelineReport(TypedDict):
    """One pipeline. JSON-able."""

    pipeline: str
    family: str
    title: str
    folders: list[str]  # classes of folders that it runs
    makes: str
    options: dict[str, bool]


class ModelsReport(TypedDict):
    """The whole matrix. JSON-able."""

    pipelines: list[PipelineReport]
    groups: dict[str, list[str]]  # names of options by group


def models_report() -> ModelsReport:
    """The matrix as plain data."""
    groups: dict[str, list[str]] = {}
    for option in PIPELINE_OPTIONS:
        groups.setdefault(option.group, []).append(option.name)
    return ModelsReport(pipelines=[_report(row) for row in capability_matrix()], groups=groups)


def render() -> str:
    """The matrix as text."""
    return as_markdown(capability_matrix()).rstrip("\n")


def document() -> str:
    """docs/capabilities.md."""
    return DOCUMENT_HEAD + as_markdown(capability_matrix())


def _report(row: PipelineRow) -> PipelineReport:
    return PipelineReport(
        pipeline=row.pipeline,
        family=row.family,
        title=row.title,
        folders=list(row.folders),
        makes=row.makes,
        options=row.options,
    )


if __name__ == "__main__":
    print(document(), end="")
