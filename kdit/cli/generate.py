"""`kdit generate`: checks the output place, runs the pipeline under Ctrl-C control, reports. Called by cli/main.py."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from kdit.cli.progress import Progress, duration, open_progress
from kdit.config import ExecuteConfig, RuntimeConfig, SampleConfig
from kdit.errors import OutputError
from kdit.output_file import check_writable, whole_file

if TYPE_CHECKING:
    from torch import Tensor

    from kdit.nodes.core.step_report import StepReport
    from kdit.pipelines.cancel_token import CancelToken
    from kdit.pipelines.result import GenerateResult

PICTURE, LATENTS = ".png", ".safetensors"


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What the command line asks for. None means "not given"."""

    prompts: tuple[str, ...]
    output: Path
    model: str
    sample_config: SampleConfig
    execute_config: ExecuteConfig
    size: tuple[int, int] | None = None
    seed: int | None = None
    num: int = 1
    negative: str | None = None
    as_json: bool = False


def run_generate(options: GenerateOptions) -> int:
    """Make the pictures and say so. Returns the exit code; deliberate errors propagate."""
    prompts = [prompt for prompt in options.prompts for _ in range(options.num)]
    paths = output_paths(options.output.expanduser(), len(prompts))
    as_latents = paths[0].suffix.lower() == LATENTS
    runtime_config = RuntimeConfig(
        seed=options.seed,
        size=options.size,
        output_type="latents" if as_latents else "decoded",
        save_paths=None if as_latents else tuple(map(str, paths)),
    )
    for path in paths:
        check_writable(path, (PICTURE, LATENTS))
    started = time.perf_counter()
    with open_progress() as progress:
        result, interrupted = _run_pipeline(options, prompts, runtime_config, progress)
    if as_latents:
        _save_all_latents(result, prompts, paths)
    _report(options, result, paths, time.perf_counter() - started)
    return 130 if interrupted else 0


def _run_pipeline(
    options: GenerateOptions, prompts: list[str], runtime_config: RuntimeConfig, progress: Progress
) -> tuple[GenerateResult, bool]:
    from kdit.pipelines.cancel_token import CancelToken

    token = CancelToken()
    with cancel_on_interrupt(token):
        progress.stage(f"opening {options.model}")
        from kdit.pipelines.pipeline import Pipeline

        pipeline = Pipeline.open(options.model, execute_config=options.execute_config)
        request = pipeline.request(
            prompts[0] if len(prompts) == 1 else prompts,
            prompt_negative=options.negative,
            sample_config=options.sample_config,
            runtime_config=runtime_config,
        )
        progress.stage(f"loading {options.model}")
        pipeline.load_models(cancel=token)
        progress.stage("encoding the prompt")
        result = pipeline.run(request, callback=_step_printer(progress), cancel=token)
    return result, token.is_set


def _step_printer(progress: Progress) -> Callable[[StepReport], None]:
    def after_step(report: StepReport) -> None:
        done = report.step_index + 1
        progress.step(done, report.num_steps, report.seconds)
        if done == report.num_steps:
            progress.stage("finishing")

    return after_step


@contextmanager
def cancel_on_interrupt(token: CancelToken) -> Iterator[None]:
    """Inside, the first Ctrl-C sets ``token`` and the second interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        if token.is_set:
            raise KeyboardInterrupt
        token.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def output_paths(output: Path, count: int) -> tuple[Path, ...]:
    """One path per sample: ``heart.png``, or ``heart-0.png``, ``heart-1.png`` ... Raises OutputError."""
    if output.suffix.lower() not in (PICTURE, LATENTS):
        raise OutputError(f"cannot write {output}: the name must end in {PICTURE} or {LATENTS}")
    if count == 1:
        return (output,)
    return tuple(output.with_name(f"{output.stem}-{i}{output.suffix}") for i in range(count))


def _save_all_latents(result: GenerateResult, prompts: list[str], paths: tuple[Path, ...]) -> None:
    for i, path in enumerate(paths):
        settings = {**result.settings, "prompt": prompts[i], "seed": result.seeds[i]}
        settings.pop("seeds", None)
        save_latents(path, result.latents[i : i + 1], settings)


def save_latents(path: Path, latents: Tensor, settings: Mapping[str, object]) -> None:
    """Write tensor ``latents`` and, as in a picture's text chunk ``kdit``, the settings; all or nothing.

    Raises OutputError.
    """
    from safetensors.torch import save

    data = save({"latents": latents.contiguous().cpu()}, metadata={"kdit": json.dumps(settings)})
    with whole_file(path) as file:
        file.write(data)


def _report(options: GenerateOptions, result: GenerateResult, paths: tuple[Path, ...], seconds: float) -> None:
    if options.as_json:
        report = {
            "files": [str(path) for path in paths],
            "seeds": list(result.seeds),
            "settings": result.settings,
            "timings": {**result.timings, "command": seconds},
            "notices": list(result.notices),
        }
        print(json.dumps(report))
        return
    took = duration(result.timings["total"])
    for path, seed in zip(paths, result.seeds, strict=True):
        print(f"wrote {path} (seed {seed})" if len(paths) > 1 else f"wrote {path} (seed {seed}, {took})")
    if len(paths) > 1:
        print(f"{len(paths)} files in {took}")
