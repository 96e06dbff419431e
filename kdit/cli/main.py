"""The `kdit` command: options and exit codes. Each command imports what it needs when it runs.

Exit codes: 0 done, 1 a check failed or a result was not finite, 2 the caller's mistake, 130 interrupted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from kdit.cli.arguments import parse_size as parse_size
from kdit.cli.arguments import readable_text as readable_text
from kdit.cli.bench.command import bench_app
from kdit.cli.generate_command import generate
from kdit.cli.messages import OneLineGroup, notes_on_stderr, one_line_errors, tolerate_any_text

app = typer.Typer(
    cls=OneLineGroup,
    help="Diffusion transformers: a prompt in, a picture or a video out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        from kdit.version import __version__

        typer.echo(f"kdit {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Diffusion transformers: a prompt in, a picture or a video out."""
    tolerate_any_text()


app.command()(generate)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="A folder of reference families, or one family.", metavar="DIR")],
    mode: Annotated[
        Literal["single", "batch"],
        typer.Option(help="batch: each case runs together with two other requests at other steps."),
    ] = "single",
    family: Annotated[list[str] | None, typer.Option(help="Only this family; repeatable.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only the case of this name; repeatable.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; the reference was made with 1.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="Where to compute.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as one JSON object.")] = False,
) -> None:
    """Compare kdit with recorded reference results, stage by stage."""
    with one_line_errors(), notes_on_stderr():
        from kdit.cli.verify.report import print_case, print_summary, report_json
        from kdit.cli.verify.run import VerifyOptions, run_verify

        options = VerifyOptions(
            folder=folder,
            batched=mode == "batch",
            families=tuple(family or ()),
            cases=tuple(case or ()),
            threads=threads,
            device=device,
        )
        report = run_verify(options, None if as_json else print_case)
        if as_json:
            typer.echo(json.dumps(report_json(report), allow_nan=False))
        else:
            print_summary(report)
    raise typer.Exit(0 if report.passed else 1)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help='A checkpoint folder or file, or "mini".')],
    components: Annotated[
        list[str] | None,
        typer.Option(help="Where parts come from that PATH lacks: FOLDER, NAME=PATH or NAME=none; repeatable."),
    ] = None,
    size: Annotated[str | None, typer.Option(help="Estimate memory for this size.", metavar="WIDTHxHEIGHT")] = None,
    frames: Annotated[int | None, typer.Option(help="Estimate memory for so many frames.", min=1)] = None,
    batch: Annotated[int, typer.Option(help="Estimate memory for so many samples at once.", min=1)] = 1,
    cfg: Annotated[float | None, typer.Option(help="Classifier-free guidance; above 1 it doubles the rows.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="Whose memory it has to fit: cpu, cuda, cuda:1.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Say what a checkpoint holds: family, components, dtypes, sizes, what is missing, and the memory it needs."""
    with one_line_errors(), notes_on_stderr():
        from kdit.cli.components import parse_components
        from kdit.cli.inspect import inspect_report, render
        from kdit.cli.inspect_memory import MemoryQuestion

        question = MemoryQuestion(
            size=None if size is None else parse_size(size),
            frames=frames,
            batch=batch,
            cfg=cfg,
            dtype=dtype,
            device=device,
        )
        report = inspect_report(path, question, parse_components(components or []))
        typer.echo(json.dumps(report) if as_json else render(report))
    raise typer.Exit(0 if report["ok"] else 1)


@app.command()
def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print the matrix as one JSON object.")] = False,
) -> None:
    """Say which pipeline supports which option."""
    with one_line_errors(), notes_on_stderr():
        from kdit.cli.models import models_report, render

        typer.echo(json.dumps(models_report()) if as_json else render())


app.add_typer(bench_app, name="bench")

if __name__ == "__main__":
    app()
