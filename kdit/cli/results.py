"""Where the results of `kdit generate` go, and the words about them. Called by cli/generate.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kdit.cli.option_names import with_options
from kdit.cli.progress import duration
from kdit.errors import OutputError
from kdit.media.formats import ALL_SUFFIXES
from kdit.output_file import whole_file

if TYPE_CHECKING:
    from torch import Tensor

    from kdit.pipelines.request import PipelineRequest
    from kdit.pipelines.result import GenerateResult


@dataclass(frozen=True, kw_only=True)
class FileReport:
    """What was written, and how long the command took."""

    paths: tuple[Path, ...]
    sheet: Path | None
    seconds: float


def checked_suffix(output: Path) -> str:
    """The suffix of a name for some result. Raises OutputError for a suffix of none."""
    suffix = output.suffix.lower()
    if suffix not in ALL_SUFFIXES:
        raise OutputError(f"cannot write {str(output)!r}: the name must end in {' or '.join(ALL_SUFFIXES)}")
    return suffix


def output_paths(output: Path, count: int) -> tuple[Path, ...]:
    """One path per sample: ``heart.png``, or ``heart-0.png``, ``heart-1.png`` ... Raises OutputError."""
    checked_suffix(output)
    if count == 1:
        return (output,)
    return tuple(output.with_name(f"{output.stem}-{i}{output.suffix}") for i in range(count))


def sheet_path(output: Path) -> Path:
    """Where the contact sheet of several files goes."""
    return output.with_name(f"{output.stem}-sheet.png")


def save_contact_sheet(result: GenerateResult, prompts: list[str], paths: tuple[Path, ...], sheet: Path) -> None:
    """One picture with all of a result, a video by its first frame, each with number, seed and prompt."""
    from kdit.media.contact_sheet import contact_sheet
    from kdit.media.image_writer import write_image
    from kdit.media.levels import to_uint8

    pictures = result.pixels if result.video is None else result.video[:, 0]
    assert pictures is not None and len(pictures) == len(prompts)
    labels = [(f"{i}   seed {seed}", prompts[i]) for i, seed in enumerate(result.seeds)]
    files = {"files": [path.name for path in paths], "seeds": list(result.seeds), "prompts": prompts}
    write_image(
        contact_sheet([to_uint8(picture) for picture in pictures], labels),
        sheet,
        {"contact sheet": json.dumps(files, ensure_ascii=False)},
    )


def save_all_latents(result: GenerateResult, request: PipelineRequest, paths: tuple[Path, ...]) -> None:
    """Each sample's latents and settings into a file of its own."""
    for i, path in enumerate(paths):
        save_latents(path, result.latents[i : i + 1], request.builder.file_settings(request.inputs, i))


def save_latents(path: Path, latents: Tensor, settings: Mapping[str, object]) -> None:
    """Write tensor ``latents`` and, as in a picture's text chunk ``kdit``, the settings; all or nothing.

    Raises OutputError.
    """
    from safetensors.torch import save

    data = save({"latents": latents.contiguous().cpu()}, metadata={"kdit": json.dumps(settings)})
    with whole_file(path) as file:
        file.write(data)


def report(result: GenerateResult, files: FileReport, *, notices: Sequence[str], as_json: bool) -> None:
    """Print what was written: lines, or one JSON object."""
    if as_json:
        told = {
            "files": [str(path) for path in files.paths],
            "sheet": None if files.sheet is None else str(files.sheet),
            "seeds": list(result.seeds),
            "settings": result.settings,
            "timings": {**result.timings, "command": files.seconds},
            "notices": [with_options(notice) for notice in (*notices, *result.notices)],
        }
        print(json.dumps(told))
        return
    took = duration(result.timings["total"])
    if len(files.paths) == 1:
        print(f"wrote {files.paths[0]} (seed {result.seeds[0]}, {took})")
        return
    for path, seed in zip(files.paths, result.seeds, strict=True):
        print(f"wrote {path} (seed {seed})")
    if files.sheet is not None:
        print(f"wrote {files.sheet} (all of them)")
    print(f"{len(files.paths)} files in {took}")
