"""`kdit generate`: checks the output place, runs the pipeline under Ctrl-C control, reports. Called by cli/main.py."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal, cast

from kdit.cli.extra import with_extra
from kdit.cli.from_file import Recording, record_media
from kdit.cli.progress import Progress, open_progress
from kdit.cli.results import (
    FileReport,
    checked_suffix,
    output_paths,
    report,
    save_all_latents,
    save_contact_sheet,
    sheet_path,
)
from kdit.config import ExecuteConfig, FileOptions, RuntimeConfig, SampleConfig
from kdit.errors import CheckpointMissingError, InputError
from kdit.media.formats import DEFAULT_SUFFIX, LATENT_SUFFIXES, check_encoder, check_output
from kdit.output_file import check_writable
from kdit.pipelines.extra_inputs import ExtraInputs, MediaInputs

if TYPE_CHECKING:
    from kdit.nodes.core.step_report import StepReport
    from kdit.pipelines.cancel_token import CancelToken
    from kdit.pipelines.pipeline import Pipeline
    from kdit.pipelines.request import PipelineRequest
    from kdit.pipelines.result import GenerateResult

BUILT_IN = "mini"
STEM = "kdit"


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What the command line asks for. None means "not given"."""

    prompts: tuple[str, ...] = ()
    output: Path | None = None
    source: Path | None = None  # a file to make again
    model: str | None = None
    components: Mapping[str, str | None] | None = None  # where parts come from that the model lacks
    variant: str | None = None
    media: MediaInputs = field(default_factory=MediaInputs)
    extra: Mapping[str, str] = field(default_factory=dict)  # inputs that only one pipeline has
    negative: str | None = None
    num: int = 1
    seed: int | None = None
    size: tuple[int, int] | None = None
    frames: int | None = None
    fps: str | None = None
    fit: Literal["reject", "pad", "crop"] | None = None
    quality: int | None = None
    crf: int | None = None
    pixel_format: Literal["yuv420p", "yuv444p"] | None = None
    steps: int | None = None
    guidance: float | None = None
    cfg: float | None = None
    cfg2: float | None = None
    strength: float | None = None
    max_sequence_length: int | None = None
    long_prompt: Literal["cut", "reject"] = "cut"
    dtype: str | None = None
    component_dtypes: Mapping[str, str] = field(default_factory=dict)
    modulation: Literal["table", "inline"] | None = None
    batch_invariant: bool | None = None
    device: str | None = None
    sheet: bool = True
    as_json: bool = False

    def sample_config(self) -> SampleConfig:
        """Raises ConfigError."""
        return SampleConfig(
            steps=self.steps,
            guidance_scale=self.guidance,
            cfg_scale=self.cfg,
            cfg_scale_2=self.cfg2,
            strength=self.strength,
            max_sequence_length=self.max_sequence_length,
            on_long_prompt=self.long_prompt,
        )

    def runtime_config(self, paths: tuple[Path, ...], *, as_latents: bool) -> RuntimeConfig:
        """Raises ConfigError."""
        return RuntimeConfig(
            seed=self.seed,
            size=self.size,
            frame_num=self.frames,
            fps=self.fps,
            fit=self.fit or "reject",
            output_type="latents" if as_latents else "decoded",
            save_paths=tuple(map(str, paths)) if paths and not as_latents else None,
            file_options=self.file_options(),
        )

    def file_options(self) -> FileOptions:
        """Raises ConfigError."""
        return FileOptions(quality=self.quality, crf=self.crf, pixel_format=self.pixel_format)

    def execute_config(self) -> ExecuteConfig:
        """Raises ConfigError."""
        return ExecuteConfig(
            dtype=self.dtype or "float32",
            component_dtypes=self.component_dtypes,
            variant=self.variant,
            modulation=self.modulation or "table",
            batch_invariant=bool(self.batch_invariant),
            device=self.device,
        )


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A request that is ready to run, and where its results go."""

    pipeline: Pipeline
    request: PipelineRequest
    paths: tuple[Path, ...]
    sheet: Path | None


def run_generate(options: GenerateOptions) -> int:
    """Make the pictures and say so. Returns the exit code; deliberate errors propagate."""
    recording = None if options.source is None else Recording.read(options.source)
    if recording is not None:
        options = filled_from(options, recording)
    if not options.prompts:
        raise InputError(
            "nothing to draw: give a PROMPT, or --from with a file that kdit made (see kdit generate --help)"
        )
    if options.output is not None:
        options = replace(options, output=options.output.expanduser())
    prompts = [prompt for prompt in options.prompts for _ in range(options.num)]
    _check_early(options, len(prompts))
    started = time.perf_counter()
    with open_progress() as progress:
        prepared, result, interrupted = _run_pipeline(options, prompts, recording, progress)
    if result.pixels is None and result.video is None:
        save_all_latents(result, prepared.request, prepared.paths)
    if prepared.sheet is not None:
        save_contact_sheet(result, prompts, prepared.paths, prepared.sheet)
    files = FileReport(paths=prepared.paths, sheet=prepared.sheet, seconds=time.perf_counter() - started)
    report(result, files, notices=recording.notes if recording else (), as_json=options.as_json)
    return 130 if interrupted else 0


def filled_from(options: GenerateOptions, recording: Recording) -> GenerateOptions:
    """``options`` with what a file records for everything that they leave open. Raises InputError."""
    given = {item.name: getattr(options, item.name) for item in fields(options)}
    found = {**recording.options(without=given), **recording.file_options(options.output, without=given)}
    return cast(Callable[..., GenerateOptions], GenerateOptions)(**{**given, **found})


def _check_early(options: GenerateOptions, num_samples: int) -> None:
    """Mistakes that can be told before the model is opened, which takes seconds."""
    options.sample_config()
    options.execute_config()
    options.runtime_config((), as_latents=False)
    if options.output is not None:
        for path in output_paths(options.output, num_samples):
            check_writable(path, (checked_suffix(options.output),))
        check_encoder(options.output, options.file_options())


def _run_pipeline(
    options: GenerateOptions, prompts: list[str], recording: Recording | None, progress: Progress
) -> tuple[_Prepared, GenerateResult, bool]:
    from kdit.pipelines.cancel_token import CancelToken

    token = CancelToken()
    with cancel_on_interrupt(token):
        progress.stage(f"opening {options.model or BUILT_IN}")
        prepared = _prepare(options, prompts, recording)
        progress.stage(f"loading {options.model or BUILT_IN}")
        prepared.pipeline.load_models(cancel=token)
        progress.stage("encoding the prompt")
        result = prepared.pipeline.run(prepared.request, callback=_step_printer(progress), cancel=token)
    return prepared, result, token.is_set


def _prepare(options: GenerateOptions, prompts: list[str], recording: Recording | None) -> _Prepared:
    from kdit.pipelines.pipeline import Pipeline

    try:
        pipeline = Pipeline.open(
            options.model or BUILT_IN, execute_config=options.execute_config(), components=options.components
        )
    except CheckpointMissingError as error:
        if recording is None or options.model != recording.model:
            raise
        raise InputError(f"{recording.name} was made with {options.model!r}: {error}; give --model") from error
    kind = pipeline.family.output
    output = options.output or Path(STEM + DEFAULT_SUFFIX[kind])
    paths = output_paths(output, len(prompts))
    as_latents = output.suffix.lower() in LATENT_SUFFIXES
    sheet = sheet_path(output) if len(paths) > 1 and options.sheet and not as_latents else None
    for path in paths if as_latents else ():
        check_output(path, "latents")
    if sheet is not None:
        check_writable(sheet)
    media, extra = options.media, None
    if recording is not None:
        recording.compare_model(pipeline.model_hash)
    with nullcontext() if recording is None else recording.settings_for(pipeline.family):
        if recording is None:
            extra = pipeline.family.take_media(media)
        else:
            media, extra = recording.extra_inputs(pipeline.family, media)
        extra = with_extra(pipeline.family, extra, options.extra)
        media, extra = _for_each_sample(options, media, extra)
        request = pipeline.request(
            prompts[0] if len(prompts) == 1 else prompts,
            prompt_negative=options.negative,
            sample_config=options.sample_config(),
            runtime_config=options.runtime_config(paths, as_latents=as_latents),
            extra_inputs=extra,
        )
    if media != MediaInputs():
        record_media(request.inputs.settings, media)
        request.check_file_texts()
    return _Prepared(pipeline=pipeline, request=request, paths=paths, sheet=sheet)


def _for_each_sample(
    options: GenerateOptions, media: MediaInputs, extra: ExtraInputs | None
) -> tuple[MediaInputs, ExtraInputs | None]:
    """What is given for each prompt, for each of the ``num`` samples of that prompt."""
    if extra is None:
        return media, None
    repeated = extra.repeated(options.num, len(options.prompts))
    if repeated != extra and len(media.images) == len(options.prompts):
        media = replace(media, images=tuple(path for path in media.images for _ in range(options.num)))
    return media, repeated


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
