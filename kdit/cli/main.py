"""The `kdit` command: options and exit codes. Each command imports what it needs when it runs.

Exit codes: 0 done, 1 a check failed or a result was not finite, 2 the caller's mistake, 130 interrupted.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from kdit.cli.messages import OneLineGroup, notes_on_stderr, one_line_errors, tolerate_any_text
from kdit.errors import InputError

app = typer.Typer(
    cls=OneLineGroup,
    help="Diffusion transformers: a prompt in, a picture out.",
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
    """Diffusion transformers: a prompt in, a picture out."""
    tolerate_any_text()


def parse_size(text: str) -> tuple[int, int]:
    """`WIDTHxHEIGHT` to (width, height). Raises InputError."""
    width, separator, height = text.lower().partition("x")
    if not (separator and width.isdecimal() and height.isdecimal() and int(width) > 0 and int(height) > 0):
        raise InputError(f"--size must be WIDTHxHEIGHT in pixels, for example 1024x768, got {text!r}")
    return int(width), int(height)


def readable_text(text: str, option: str) -> str:
    """A command-line argument as Unicode, also where the locale could not decode it. Raises InputError."""
    try:
        text.encode()
    except UnicodeEncodeError:  # Python keeps undecodable bytes as lone surrogates
        try:
            return os.fsencode(text).decode()
        except UnicodeError:
            raise InputError(f"{option} is not valid UTF-8: {text!a}") from None
    return text


@app.command()
def generate(
    prompt: Annotated[list[str], typer.Argument(help="What to draw; several prompts make several pictures.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A .png picture, or a .safetensors file of latents.")
    ] = Path("kdit.png"),
    model: Annotated[str, typer.Option(help='A checkpoint folder, or the built-in model "mini".')] = "mini",
    size: Annotated[str | None, typer.Option(help="Size in pixels.", metavar="WIDTHxHEIGHT")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the first picture; the i-th has seed+i.")] = None,
    num: Annotated[int, typer.Option(help="Pictures per prompt.", min=1)] = 1,
    guidance: Annotated[float | None, typer.Option(help="Embedded guidance of a distilled model.")] = None,
    cfg: Annotated[float | None, typer.Option(help="Classifier-free guidance; 1 or less is off.")] = None,
    negative: Annotated[str | None, typer.Option(help="What to keep away from (needs --cfg above 1).")] = None,
    max_sequence_length: Annotated[int | None, typer.Option(help="Text tokens, padding included.")] = None,
    long_prompt: Annotated[
        Literal["cut", "reject"], typer.Option(help="What happens to a prompt of more tokens than the model reads.")
    ] = "cut",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    modulation: Annotated[
        Literal["table", "inline"],
        typer.Option(help="Modulation vectors: all before the loop, or each step's inside it."),
    ] = "table",
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Same bits whatever a picture is batched with (slower).")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; default: cuda if there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print files, seeds, settings and timings as JSON.")] = False,
) -> None:
    """Make pictures from prompts."""
    with one_line_errors(), notes_on_stderr():
        from kdit.cli.generate import GenerateOptions, run_generate
        from kdit.config import ExecuteConfig, SampleConfig

        options = GenerateOptions(
            prompts=tuple(readable_text(text, "PROMPT") for text in prompt),
            negative=None if negative is None else readable_text(negative, "--negative"),
            output=output,
            model=model,
            size=None if size is None else parse_size(size),
            seed=seed,
            num=num,
            sample_config=SampleConfig(
                steps=steps,
                guidance_scale=guidance,
                cfg_scale=cfg,
                max_sequence_length=max_sequence_length,
                on_long_prompt=long_prompt,
            ),
            execute_config=ExecuteConfig(
                dtype=dtype,
                modulation=modulation,
                batch_invariant=batch_invariant,
                device=device,
            ),
            as_json=as_json,
        )
        code = run_generate(options)
    raise typer.Exit(code)


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
    path: Annotated[str, typer.Argument(help='A checkpoint folder, or "mini".')],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Say what a checkpoint holds: family, components, dtypes, sizes, and what is missing."""
    with one_line_errors(), notes_on_stderr():
        from kdit.cli.inspect import inspect_report, render

        report = inspect_report(path)
        typer.echo(json.dumps(report) if as_json else render(report))
    raise typer.Exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    app()
