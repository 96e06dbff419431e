"""The options of `kdit generate`. Added to the command in cli/main.py; imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kdit.cli.arguments import parse_size, readable_text
from kdit.cli.messages import notes_on_stderr, one_line_errors
from kdit.collector import collector_paused


def generate(
    prompt: Annotated[
        list[str] | None, typer.Argument(help="What to draw; several prompts make several files. Optional with --from.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Picture: .png .jpg .webp; video: .mp4 .gif .webp; latents: .safetensors. "
            "Default: kdit.png or kdit.mp4, as the model makes.",
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Make a file of kdit again; what is given beside it replaces its settings."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help='A checkpoint folder or single file, or the built-in model "mini" (default).')
    ] = None,
    components: Annotated[
        list[str] | None,
        typer.Option(help="Where parts come from that the model lacks: FOLDER, NAME=PATH or NAME=none; repeatable."),
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help='Weight files to take where a folder has several sets, such as "fp16".')
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="A picture to start from, change or refer to; repeatable.")
    ] = None,
    mask: Annotated[
        Path | None, typer.Option(help="What of the picture is repainted: white is, black is kept.")
    ] = None,
    control: Annotated[Path | None, typer.Option(help="A picture that guides the form.")] = None,
    last_image: Annotated[Path | None, typer.Option(help="The picture at which a video ends.")] = None,
    strength: Annotated[
        float | None, typer.Option(help="How much of --image is changed: 0 keeps it, 1 ignores it.")
    ] = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(
            help='NAME=VALUE: an input that only this pipeline has, such as "prompt_2=...", "composite=true" or '
            '"skip_layers=[7, 8, 9]"; repeatable. A wrong name lists them.'
        ),
    ] = None,
    size: Annotated[str | None, typer.Option(help="Size in pixels.", metavar="WIDTHxHEIGHT")] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of a video.")] = None,
    fps: Annotated[str | None, typer.Option(help="Frames per second: 24, 23.976, 24000/1001.")] = None,
    fit: Annotated[
        Literal["reject", "pad", "crop"] | None,
        typer.Option(
            help="A size that the model cannot make: refuse it, or make a larger one and cut it (pad, crop). "
            "A picture of another shape: stretch it to the size, pad it, or crop it."
        ),
    ] = None,
    quality: Annotated[int | None, typer.Option(help="Of .jpg and .webp: 1 to 100.")] = None,
    crf: Annotated[int | None, typer.Option(help="Of .mp4: 0 (best) to 51.")] = None,
    pixel_format: Annotated[
        Literal["yuv420p", "yuv444p"] | None,
        typer.Option(help="Of .mp4: colour once for 2x2 pixels (default, plays anywhere), or for each."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the first picture; the i-th has seed+i.")] = None,
    num: Annotated[int, typer.Option(help="Pictures per prompt.", min=1)] = 1,
    guidance: Annotated[float | None, typer.Option(help="Embedded guidance of a distilled model.")] = None,
    cfg: Annotated[float | None, typer.Option(help="Classifier-free guidance; 1 or less is off.")] = None,
    cfg2: Annotated[float | None, typer.Option("--cfg2", help="The same of a second expert.")] = None,
    negative: Annotated[str | None, typer.Option(help="What to keep away from (needs --cfg above 1).")] = None,
    max_sequence_length: Annotated[int | None, typer.Option(help="Text tokens, padding included.")] = None,
    long_prompt: Annotated[
        Literal["cut", "reject"], typer.Option(help="What happens to a prompt of more tokens than the model reads.")
    ] = "cut",
    dtype: Annotated[str | None, typer.Option(help="float32 (default), bfloat16 or float16.")] = None,
    modulation: Annotated[
        Literal["table", "inline"] | None,
        typer.Option(help="Modulation vectors: all before the loop (table, default), or each step's inside it."),
    ] = None,
    batch_invariant: Annotated[
        bool | None,
        typer.Option(
            "--batch-invariant/--no-batch-invariant", help="Same bits whatever a picture is batched with (slower)."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; default: cuda if there is one.")] = None,
    sheet: Annotated[
        bool, typer.Option("--sheet/--no-sheet", help="Of several files: also one picture that shows them all.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print files, seeds, settings and timings as JSON.")] = False,
) -> None:
    """Make pictures or videos from prompts."""
    with one_line_errors(), notes_on_stderr():
        with collector_paused():
            from kdit.cli.components import parse_components
            from kdit.cli.extra import parse_extra
            from kdit.cli.generate import GenerateOptions, run_generate
            from kdit.pipelines.extra_inputs import MediaInputs

        options = GenerateOptions(
            prompts=tuple(readable_text(text, "PROMPT") for text in prompt or ()),
            negative=None if negative is None else readable_text(negative, "--negative"),
            output=output,
            source=source,
            model=model,
            components=parse_components(components or []),
            variant=variant,
            media=MediaInputs(
                images=tuple(str(path.expanduser()) for path in image or ()),
                mask=_path(mask),
                control=_path(control),
                last_image=_path(last_image),
            ),
            strength=strength,
            extra=parse_extra([readable_text(text, "--extra") for text in extra or ()]),
            size=None if size is None else parse_size(size),
            frames=frames,
            fps=fps,
            fit=fit,
            quality=quality,
            crf=crf,
            pixel_format=pixel_format,
            steps=steps,
            seed=seed,
            num=num,
            guidance=guidance,
            cfg=cfg,
            cfg2=cfg2,
            max_sequence_length=max_sequence_length,
            long_prompt=long_prompt,
            dtype=dtype,
            modulation=modulation,
            batch_invariant=batch_invariant,
            device=device,
            sheet=sheet,
            as_json=as_json,
        )
        code = run_generate(options)
    raise typer.Exit(code)


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path.expanduser())
