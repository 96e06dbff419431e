"""What ``kdit inspect`` says about a checkpoint folder: a report as plain data, and its text form."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from kdit.cli.inspect_memory import MemoryQuestion, MemoryReport, memory_lines, memory_report, readable
from kdit.errors import CheckpointError
from kdit.keys import FAMILIES, FamilyEntry
from kdit.models.checkpoint import INDEX_FILE, Checkpoint, read_components, read_index, resolve_model_path
from kdit.models.checkpoint_info import CheckpointInfo, read_info
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


class InspectReport(TypedDict):
    """A checkpoint folder. JSON-able."""

    path: str
    ok: bool
    pipeline_class: str | None
    family: str | None  # None: kdit has no network for it
    supported: bool  # whether kdit has a pipeline for it
    name: str | None
    version: str | None
    attribution: list[str]
    components: list[ComponentReport]
    parameters: int
    weight_bytes: dict[str, int]  # memory of all weights: as stored, and loaded in a dtype
    missing_optional: list[str]  # components that the pipeline can do without
    memory: MemoryReport | None  # None where the checkpoint cannot be used
    weight_hash: str | None  # None where a component is faulty
    faults: list[str]  # those that belong to no component


def inspect_report(path: str | Path, question: MemoryQuestion | None = None) -> InspectReport:
    """Look at a folder, or at "mini", and list everything that is wrong with it.

    Tensor names and shapes are compared for kdit's own networks; those of text encoders and autoencoders
    are compared when they are loaded. ``question``: whose memory to estimate, by default one sample at default size.
    Raises CheckpointError only if there is no folder at all, and InputError for a question that has no answer.
    """
    folder = resolve_model_path(path)
    faults: list[str] = []
    index, components = _read_layout(folder, faults)
    info = CheckpointInfo()
    try:
        info = read_info(folder)
    except CheckpointError as fault:
        faults.append(str(fault))
    scanned = [_component_report(component) for component in components.values()]
    pipeline_class = str(index["_class_name"]) if index else None
    entry = _family(pipeline_class, components)
    supported = entry is not None and pipeline_class in entry.pipelines
    if index and not supported:
        known = ", ".join(name for family in FAMILIES.values() for name in family.pipelines)
        faults.append(f"{folder / INDEX_FILE}: _class_name is {pipeline_class!r}; kdit has pipelines for {known}")
    checkpoint = Checkpoint(folder, index, components, info)
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
        supported=supported,
        name=info.name,
        version=info.version,
        attribution=list(info.attribution),
        components=scanned,
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
    kind = report["family"] or "no family of kdit"
    lines = [report["path"] + (f": {title}" if title else ""), f"{kind}, {report['pipeline_class'] or 'no pipeline'}"]
    rows = [_row(component) for component in report["components"]]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(rows[0]) if rows else 0)]
    for row, component in zip(rows, report["components"], strict=True):
        lines.append("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        lines += [f"      ! {fault}" for fault in component["faults"]]
        lines += [f"      {notice}" for notice in component["notices"]]
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


def _read_layout(folder: Path, faults: list[str]) -> tuple[dict[str, object], dict[str, ComponentFolder]]:
    """The index and its components; without a usable index, the sub-folders that have a model's config."""
    if folder.is_file():
        return _read_file(folder, faults)
    try:
        index = read_index(folder)
        return index, read_components(folder, index)
    except CheckpointError as fault:
        faults.append(str(fault))
    found = {}
    for config in sorted(folder.glob("*/config.json")):
        try:
            found[config.parent.name] = ComponentFolder.at(config.parent)
        except CheckpointError as fault:
            faults.append(str(fault))
    return {}, found


def _read_file(path: Path, faults: list[str]) -> tuple[dict[str, object], dict[str, ComponentFolder]]:
    """What a single file holds; what it lacks is a fault that says who supplies it."""
    try:
        opened = Checkpoint.open(path)
    except CheckpointError as fault:
        faults.append(str(fault))
        return {}, {}
    if opened.missing is not None:
        faults.append(str(opened.missing))
    return opened.index, opened.components


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
