"""Finds the safetensors files of one component, sharded or not, and checks all of their headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from kdit.errors import CheckpointError, CheckpointMissingError
from kdit.models.weights.header import BITS, TensorInfo, read_header
from kdit.models.weights.json_file import read_json
from kdit.models.weights.scales import with_scales
from kdit.models.weights.variants import choose_set, weight_sets

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_SAMPLES = 5


@dataclass(frozen=True)
class WeightFiles:
    """The weights of one component as their headers describe them."""

    folder: Path
    files: tuple[Path, ...] = ()  # those whose header could be read
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    variant: str | None = None  # which of the folder's sets of files this is; None: the plain one

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(info.num_elements for info in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(info.num_bytes for info in self.tensors.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """Parameters per dtype of the files."""
        counts: Counter[str] = Counter()
        for info in self.tensors.values():
            counts[info.dtype] += info.num_elements
        return dict(counts.most_common())


class WeightScan(NamedTuple):
    """What could be read, and everything that is wrong."""

    weights: WeightFiles
    faults: tuple[CheckpointError, ...]
    notices: tuple[str, ...] = ()  # what is odd and harms nothing


def scan_weights(folder: Path, stem: str, variant: str | None = None) -> WeightScan:
    """Check ``<stem>.safetensors``, or the shards that ``<stem>.safetensors.index.json`` lists, or a variant of these;
    see ``choose_set``.

    Raises nothing; the faults are in the result.
    """
    try:
        present = sorted(path.name for path in folder.iterdir() if path.is_file())
    except OSError as error:
        missing = CheckpointMissingError(f"{folder} cannot be read: {error.strerror or error}")
        return WeightScan(WeightFiles(folder), (missing,))
    sets = weight_sets(present, stem)
    try:
        chosen, told = choose_set(sets, variant, str(folder))
    except CheckpointError as fault:
        return WeightScan(WeightFiles(folder), (fault,))
    if chosen is None:
        shards = {name for found in sets.values() for name in found.shards}
        return WeightScan(WeightFiles(folder), (_nothing_found(folder, stem, present, shards),))
    if chosen.single and (chosen.index or chosen.shards):
        other = chosen.index or sorted(chosen.shards)[0]
        both = CheckpointError(f"{folder} holds both {chosen.single} and {other}; which one counts? Remove the other")
        return WeightScan(WeightFiles(folder), (both,))
    if chosen.index:
        scan = _scan_shards(folder, chosen.index, chosen.shards)
    else:
        assert chosen.single is not None
        scan = _scan_files(folder, [chosen.single])
    scan = scan._replace(
        weights=replace(scan.weights, variant=chosen.variant),
        notices=(*((told,) if told else ()), *scan.notices),
    )
    return _scaled(scan)


def open_weights(folder: Path, stem: str, variant: str | None = None) -> WeightFiles:
    """``scan_weights`` for callers that want no faults; raises the first."""
    scan = scan_weights(folder, stem, variant)
    raise_first(scan.faults)
    return scan.weights


def raise_first(faults: Sequence[CheckpointError]) -> None:
    """Raise the first fault, if there is one, with the number of the others."""
    if not faults:
        return
    first, others = faults[0], len(faults) - 1
    if others:
        message = f"{first.args[0]} [and {others} more; 'kdit inspect' lists all]"
        raise type(first)(message, table=first.table) from first
    raise first


def samples(names: Iterable[str]) -> str:
    """The first few names and how many more there are, for messages."""
    ordered = sorted(names)
    more = len(ordered) - _SAMPLES
    return ", ".join(ordered[:_SAMPLES]) + (f" and {more} more" if more > 0 else "")


def _scaled(scan: WeightScan) -> WeightScan:
    """A weight and its scale may lie in different shards, so they are joined when all are read."""
    tensors, faults = with_scales(scan.weights.tensors)
    return scan._replace(weights=replace(scan.weights, tensors=tensors), faults=(*scan.faults, *faults))


def _scan_files(folder: Path, names: Sequence[str]) -> WeightScan:
    tensors: dict[str, TensorInfo] = {}
    files = []
    faults = []
    for name in names:
        try:
            header = read_header(folder / name)
        except CheckpointError as fault:
            faults.append(fault)
            continue
        files.append(folder / name)
        if twice := header.keys() & tensors.keys():
            faults.append(CheckpointError(f"{folder / name} holds tensors that another shard has: {samples(twice)}"))
        tensors.update(header)
    # Wider integers are position ids and the like; narrow ones are quantised weights, which need more than a scale.
    allowed = ("BOOL", *FLOAT_DTYPES)
    if narrow := [info for info in tensors.values() if BITS[info.dtype] <= 8 and info.dtype not in allowed]:
        faults.append(
            CheckpointError(
                f"{narrow[0].path} holds {len(narrow)} tensors in {narrow[0].dtype}, which is not supported,"
                f" expected {', '.join(FLOAT_DTYPES)}: {samples(info.name for info in narrow)}"
            )
        )
    return WeightScan(WeightFiles(folder, tuple(files), tensors), tuple(faults))


def _scan_shards(folder: Path, index: str, on_disk: set[str]) -> WeightScan:
    try:
        weight_map = _read_weight_map(folder / index)
    except CheckpointError as fault:
        return WeightScan(WeightFiles(folder), (fault,))
    listed = set(weight_map.values())
    absent = sorted(name for name in listed if not (folder / name).is_file())
    scan = _scan_files(folder, sorted(listed.difference(absent)))
    faults = list(scan.faults)
    if absent:
        faults.insert(
            0,
            CheckpointMissingError(
                f"{folder}: {len(absent)} of {len(listed)} shards in {index} are missing: {', '.join(absent)}"
                " (incomplete download?)"
            ),
        )
    numberings = {_numbering(name) for name in listed}
    unknown = sorted(on_disk - listed)
    if own := [name for name in unknown if _numbering(name) in numberings]:  # one of the same series is missed
        faults.append(CheckpointError(f"{folder}: {index} does not list {', '.join(own)} (stale index?)"))
    notices = tuple(
        f"{folder}: {name} is not read, {index} does not list it (left over from another download?)"
        for name in unknown
        if name not in own
    )
    read = {path.name for path in scan.weights.files}
    found = {name: info.path.name for name, info in scan.weights.tensors.items()}
    promised = {name: shard for name, shard in weight_map.items() if shard in read}
    if wrong := {name for name in found.keys() | promised.keys() if found.get(name) != promised.get(name)}:
        faults.append(
            CheckpointError(
                f"{folder}: {index} and the shards disagree on {len(wrong)} tensors: {samples(wrong)} (stale index?)"
            )
        )
    return WeightScan(scan.weights, tuple(faults), notices)


def _numbering(shard: str) -> str:
    """``00003`` of ``model-00001-of-00003.safetensors``: shards of one series agree in it."""
    return shard.rsplit("-of-", 1)[-1].split(".")[0]


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map from tensor names to shards")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{path}: weight_map names the shard {shard!r}, expected a file of the same folder")
    return weight_map


def _nothing_found(folder: Path, stem: str, present: list[str], shards: set[str]) -> CheckpointError:
    expected = f"{stem}.safetensors or {stem}.safetensors.index.json"
    if shards:
        return CheckpointMissingError(
            f"{folder} holds {len(shards)} shards but not {stem}.safetensors.index.json (incomplete download?)"
        )
    if other := [name for name in present if name.endswith(".safetensors")]:
        return CheckpointMissingError(f"{folder}: expected {expected}, found {samples(other)}; rename the one to use")
    if pickles := [name for name in present if name.endswith(PICKLE_SUFFIXES)]:
        return CheckpointError(
            f"{folder}: the weights are there only as a pickle ({samples(pickles)}), which can run code when it is"
            f" loaded; convert them to safetensors, expected {expected}"
        )
    return CheckpointMissingError(f"{folder}: no weights, expected {expected}; found {samples(present) or 'nothing'}")
