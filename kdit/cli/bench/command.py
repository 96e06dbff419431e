"""The options of `kdit bench`. Added to the command in cli/main.py; imports what it needs when it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from kdit.cli.bench.shape import shape_names
from kdit.cli.messages import notes_on_stderr, one_line_errors

bench_app = typer.Typer(cls=TyperGroup, help="Measure kdit side by side with diffusers.", no_args_is_help=True)


@bench_app.callback()
def bench() -> None:
    """Measure kdit side by side with diffusers."""


@bench_app.command()
def compare(
    model: Annotated[str | None, typer.Option(help='A checkpoint folder, or "mini".')] = None,
    config: Annotated[
        str | None,
        typer.Option(help=f"A shape whose weights are made up: {', '.join(shape_names())}, or a file of such a form."),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="With --config: write the model below this folder and use it again next time.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Requests of each side that count.", min=1)] = 5,
    fresh: Annotated[int, typer.Option(help="Fresh processes of each side and kind.", min=1)] = 3,
    no_fresh: Annotated[bool, typer.Option("--no-fresh", help="Leave out what needs fresh processes.")] = False,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.", min=1)] = None,
    cfg: Annotated[float | None, typer.Option(help="Classifier-free guidance; 1 or less is off.")] = None,
    size: Annotated[str | None, typer.Option(help="Size in pixels.", metavar="WIDTHxHEIGHT")] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of a video.", min=1)] = None,
    max_sequence_length: Annotated[int | None, typer.Option(help="Text tokens, padding included.", min=1)] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of both sides; default: as torch does.", min=1)
    ] = None,
    prompt: Annotated[str, typer.Option(help="What to draw.")] = "a red heart",
    seed: Annotated[int, typer.Option(help="Seed of the noise.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as one JSON object.")] = False,
) -> None:
    """Run kdit and diffusers in turn on the same weights; print medians and ratios (kdit / diffusers).

    Exit code 1 if their latents differ too much for the times to be comparable.
    """
    with one_line_errors(), notes_on_stderr():
        from kdit.cli.arguments import parse_size
        from kdit.cli.bench.compare import run_compare
        from kdit.cli.bench.options import BenchOptions
        from kdit.cli.bench.report import render

        options = BenchOptions(
            model=model,
            config=config,
            keep=keep,
            rounds=rounds,
            fresh=0 if no_fresh else fresh,
            steps=steps,
            cfg=cfg,
            size=None if size is None else parse_size(size),
            frames=frames,
            max_sequence_length=max_sequence_length,
            dtype=dtype,
            threads=threads,
            prompt=prompt,
            seed=seed,
        )
        numbers = run_compare(options, lambda line: print(line, file=sys.stderr, flush=True))
        typer.echo(json.dumps(numbers, allow_nan=False) if as_json else render(numbers))
    raise typer.Exit(0 if numbers["agree"] else 1)
