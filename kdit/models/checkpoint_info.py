"""CheckpointInfo: the optional kdit.json of a checkpoint folder, with what model_index.json cannot state."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from kdit.config import RuntimeConfig, SampleConfig
from kdit.errors import CheckpointError, ConfigError
from kdit.models.weights.json_file import read_json

INFO_FILE = "kdit.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDefaults:
    """Settings of requests that state none. None: the family's own default applies."""

    size: tuple[int, int] | None = None  # (width, height), pixels
    steps: int | None = None
    cfg_scale: float | None = None
    guidance_scale: float | None = None
    max_sequence_length: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """Name, version, sources and defaults. Empty for a folder without kdit.json."""

    name: str | None = None
    version: str | None = None
    attribution: tuple[str, ...] = ()
    defaults: CheckpointDefaults = CheckpointDefaults()


def read_info(folder: Path) -> CheckpointInfo:
    """Parse ``folder``/kdit.json, if there is one. Raises CheckpointError on an unknown key or a wrong value."""
    path = folder / INFO_FILE
    if not path.exists():
        return CheckpointInfo()
    table = read_json(path)
    _refuse_unknown(table, [item.name for item in fields(CheckpointInfo)], str(path))
    defaults = table.get("defaults", {})
    if not isinstance(defaults, dict):
        raise CheckpointError(f"{path}: defaults is {defaults!r}, expected an object")
    return CheckpointInfo(
        name=_text(table, "name", path),
        version=_text(table, "version", path),
        attribution=_attribution(table.get("attribution", []), path),
        defaults=_read_defaults(defaults, f'{path} "defaults"'),
    )


def _read_defaults(table: dict[str, object], where: str) -> CheckpointDefaults:
    _refuse_unknown(table, [item.name for item in fields(CheckpointDefaults)], where)
    size = table.get("size")
    if size is not None and not isinstance(size, list):
        raise CheckpointError(f"{where}: size is {size!r}, expected [width, height]")
    try:  # the same checks as a request's own settings
        checked = SampleConfig(**{name: value for name, value in table.items() if name != "size"})  # type: ignore[arg-type]
        runtime = RuntimeConfig(size=None if size is None else tuple(size))
    except ConfigError as error:
        told = str(error).replace("`", "")  # no option of the command line would help
        raise CheckpointError(f"{where}: {told}") from error
    return CheckpointDefaults(
        size=runtime.size,
        steps=checked.steps,
        cfg_scale=checked.cfg_scale,
        guidance_scale=checked.guidance_scale,
        max_sequence_length=checked.max_sequence_length,
    )


def _refuse_unknown(table: dict[str, object], known: list[str], where: str) -> None:
    if unknown := [name for name in table if name not in known]:
        raise CheckpointError(f"{where}: unknown {', '.join(map(repr, unknown))}; known: {', '.join(known)}")


def _text(table: dict[str, object], name: str, path: Path) -> str | None:
    value = table.get(name)
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{path}: {name} is {value!r}, expected a string")
    return value


def _attribution(value: object, path: Path) -> tuple[str, ...]:
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise CheckpointError(f"{path}: attribution is {value!r}, expected a string or a list of strings")
    return tuple(lines)
