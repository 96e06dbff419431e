"""What ``kdit inspect`` says about a checkpoint folder: a report as plain data, and its text form."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from kdit.cli.inspect_layout import read_layout
from kdit.cli.inspect_memory import MemoryQuestion, MemoryReport, memory_lines, memory_report, readable
from kdit.errors import CheckpointError
from kdit.keys import FAMILIES, FamilyEntry
from kdit.models.checkpoint import INDEX_FILE, Checkpoint
from kdit.models.single_file.component_table import ComponentRow
from kdit.models.single_file.component_table import render as render_rows
from kdit.models.single_file.sources import Components
from kdit.models.weights.component_folder import ComponentFolder, ComponentKind
from kdit.models.weights.weight_files import WeightFiles

_BYTES_PER_PARAMETER = {"float32": 4, "bfloat16": 2}


class ComponentReport(TypedDict):
    """One component; the counts are 0 for one without weights."""

    name: str
    library: str
    class_name: str
    files: list[str]
    variant: str | None  # which of several sets of weight files
    dtypes: dict[str, int]  # parameters by the files' dtype
    parameters: int
    bytes: int
    status: str  # "ok" or "faulty"
    faults: list[str]
    notices: list[str]  # what is odd and harms nothing


class ComponentSource(TypedDict):
    """Where one component comes from; of a missing one, the option that supplies it."""

    name: str
    state: str
    source: str


class InspectReport(TypedDict):
    """A checkpoint folder or file. JSON-able."""

    path: str
    ok: bool
    pipeline_class: str | None
    family: str | None  # None: kdit has no network for it
    part_of: list[str]  # of a file without a network: the families that it can be a part of
    supported: bool  # whether kdit has a pipeline for it
    name: str | None
    version: str | None
    attribution: list[str]
    components: list[ComponentReport]
    sources: list[ComponentSource]  # where components come from, or what would supply them, if not all from one folder
    parameters: int
    weight_bytes: dict[str, int]  # memory of all weights: as stored, and loaded in a dtype
    missing_optional: list[str]  # components that the pipeline can do without
    memory: MemoryReport | None  # None where the checkpoint cannot be used
    weight_hash: str | None  # None where a component is faulty
    faults: list[str]  # those that belong to no component


def inspect_report(
    path: str | Path, question: MemoryQuestion | None = None, components: Components | None = None
) -> InspectReport:
    """Look at a folder, a file or "mini", and list everything that is wrong with it.

    Tensor names and shapes are compared for kdit's own networks; those of text encoders and autoencoders
    are compared when they are loaded. ``question``: whose memory to estimate, by default one sample at default size.
    ``components``: where parts come from that ``path`` lacks, as ``Pipeline.from_models`` takes them.
    Raises CheckpointError only if there is nothing at all, and InputError for what has no answer.
    """
    layout = read_layout(path, components)
    checkpoint, faults = layout.checkpoint, list(layout.faults)
    folder, index, info = checkpoint.path, checkpoint.index, checkpoint.info
    scanned = [_component_report(component) for component in checkpoint.components.values()]
    pipeline_class = str(index["_class_name"]) if index else None
    entry = _family(pipeline_class, checkpoint.components)
    supported = entry is not None and pipeline_class in entry.pipelines
    if index and not supported:
        known = ", ".join(name for family in FAMILIES.values() for name in family.pipelines)
        faults.append(f"{folder / INDEX_FILE}: _class_name is {pipeline_class!r}; kdit has pipelines for {known}")
    if index and supported and not (folder.is_file() and faults):  # those name what is missing already
        faults += _pipeline_faults(checkpoint, scanned)
    intact = bool(scanned) and all(report["status"] == "ok" for report in scanned)
    usable = intact and not faults
    parameters = sum(report["parameters"] for report in scanned)
    return InspectReport(
        path=str(folder),
        ok=usable,
        pipeline_class=pipeline_class,
        family=entry.title if entry else None,
        part_of=list(layout.part_of),
        supported=supported,
        name=info.name,
        version=info.version,
        attribution=list(info.attribution),
        components=scanned,
        sources=[ComponentSource(name=row.name, state=row.state, source=row.source) for row in checkpoint.rows],
        parameters=parameters,
        weight_bytes={
            "stored": sum(report["bytes"] for report in scanned),
            **{dtype: parameters * size for dtype, size in _BYTES_PER_PARAMETER.items()},
        },
        missing_optional=_missing_optional(checkpoint) if usable else [],
        memory=_memory(checkpoint, question or MemoryQuestion()) if usable else None,
        weight_hash=checkpoint.weight_hash() if intact else None,
        faults=faults,
    )


def render(report: InspectReport) -> str:
    """The report as lines of text."""
    title = " ".join(part for part in (report["name"], report["version"]) if part)
    kind = report["family"] or (
        f"part of {' or '.join(report['part_of'])}" if report["part_of"] else "no family of kdit"
    )
    lines = [report["path"] + (f": {title}" if title else ""), f"{kind}, {report['pipeline_class'] or 'no pipeline'}"]
    rows = [_row(component) for component in report["components"]]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(rows[0]) if rows else 0)]
    for row, component in zip(rows, report["components"], strict=True):
        lines.append("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        lines += [f"      ! {fault}" for fault in component["faults"]]
        lines += [f"      {notice}" for notice in component["notices"]]
    if report["sources"]:
        lines += ["components:", render_rows([ComponentRow(**source) for source in report["sources"]])]
    memory = report["weight_bytes"]
    lines.append(f"{report['parameters']:,} parameters")
    sizes = [readable(size) + (" as stored" if name == "stored" else f" in {name}") for name, size in memory.items()]
    lines.append(f"memory of all weights: {', '.join(sizes)}")
    if report["missing_optional"]:
        lines.append(f"without {', '.join(report['missing_optional'])} (optional)")
    if report["memory"]:
        lines += memory_lines(report["memory"])
    if report["weight_hash"]:
        lines.append(f"weight hash: {report['weight_hash']}")
    lines += [f"made from: {source}" for source in report["attribution"]]
    lines += [f"! {fault}" for fault in report["faults"]]
    lines.append("ok" if report["ok"] else "NOT usable as it is: see the lines with !")
    return "\n".join(lines)


def _component_report(component: ComponentFolder) -> ComponentReport:
    scan = component.scan()
    weights = scan.weights or WeightFiles(component.path)
    faults = [str(fault) for fault in scan.faults] or _network_faults(component)
    return ComponentReport(
        name=component.name,
        library=component.library,
        class_name=component.class_name,
        files=[path.name for path in weights.files],
        variant=weights.variant,
        dtypes=weights.dtypes,
        parameters=weights.num_parameters,
        bytes=weights.num_bytes,
        status="faulty" if faults else "ok",
        faults=faults,
        notices=list(scan.notices),
    )


def _pipeline_faults(checkpoint: Checkpoint, scanned: list[ComponentReport]) -> list[str]:
    """What the pipeline would refuse beside the components' own faults: what is absent, settings that it cannot
    use, tokenizers that do not load.
    """
    from kdit.models.text_encoder import load_tokenizer
    from kdit.pipelines.checkpoint_faults import checkpoint_faults
    from kdit.pipelines.registry import pipeline_of

    family = pipeline_of(checkpoint)
    faults = [str(fault) for fault in checkpoint_faults(checkpoint, family)]
    tokenizers = [component.tokenizer for component in family.components.values()]
    for report in scanned:
        is_tokenizer = checkpoint.components[report["name"]].kind is ComponentKind.TOKENIZER  # or an image processor
        if report["name"] in tokenizers and is_tokenizer and report["status"] == "ok":
            try:
                load_tokenizer(checkpoint.component(report["name"]).path)
            except CheckpointError as fault:
                faults.append(str(fault))
    told = {fault for report in scanned for fault in report["faults"]}
    return [fault for fault in dict.fromkeys(faults) if fault not in told]


def _missing_optional(checkpoint: Checkpoint) -> list[str]:
    from kdit.pipelines.registry import pipeline_of

    optional = [component.folder for component in pipeline_of(checkpoint).components.values() if component.optional]
    return [name for name in optional if name not in checkpoint.components]


def _memory(checkpoint: Checkpoint, question: MemoryQuestion) -> MemoryReport:
    from kdit.pipelines.registry import pipeline_of

    return memory_report(checkpoint, pipeline_of(checkpoint), question)


def _network_faults(component: ComponentFolder) -> list[str]:
    """Whether the tensors of a network of ours are those that it needs; nothing is allocated."""
    if component.kind is not ComponentKind.MODEL or _family(None, {component.name: component}) is None:
        return []
    from kdit.models.weights.loading import check_network

    try:
        check_network(component)
    except CheckpointError as fault:
        return [str(fault)]
    return []


def _family(pipeline_class: str | None, components: dict[str, ComponentFolder]) -> FamilyEntry | None:
    classes = {component.class_name for component in components.values()}
    for entry in FAMILIES.values():
        if pipeline_class in entry.pipelines or classes.intersection(entry.network_classes):
            return entry
    return None


def _row(component: ComponentReport) -> tuple[str, ...]:
    has_weights = component["parameters"] > 0
    return (
        component["name"],
        component["class_name"],
        f"{component['parameters']:,}" if has_weights else "",
        "/".join(component["dtypes"]),
        readable(component["bytes"]) if has_weights else "",
        f"variant {component['variant']}" if component["variant"] else "",
        f"{len(component['files'])} files" if len(component["files"]) > 1 else "",
        component["status"],
    )
