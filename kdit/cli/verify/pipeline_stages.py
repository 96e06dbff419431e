"""The stages of a whole request, from prompt to pixels, alone or inside a batch. Used by verify/run.py."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kdit.cli.verify.call_mapping import CallMapping, Request, mapping_of
from kdit.cli.verify.case import Case
from kdit.cli.verify.compare import StageReport, compare, errors_fail, failed
from kdit.config import ExecuteConfig
from kdit.keys import TensorKey
from kdit.models.weights.json_file import read_json
from kdit.pipelines.pipeline import Pipeline
from kdit.pipelines.pipeline_run import PipelineRun

EMBEDDINGS, NOISE, FIRST_OUTPUT = "prompt embeddings", "initial latents", "first network output"
SCHEDULE, LATENTS, OUTPUT = "timesteps", "latents", "output"
PREPARATION = "preparation"  # reported only if the model cannot be loaded or the call cannot be expressed
PIPELINE_STAGES = (EMBEDDINGS, NOISE, FIRST_OUTPUT, SCHEDULE, LATENTS, OUTPUT)
TOLERANCES = {EMBEDDINGS: 1e-5, NOISE: 1e-6, FIRST_OUTPUT: 1e-4, SCHEDULE: 1e-6, LATENTS: 1e-4, OUTPUT: 1e-3}
LARGEST_PIXEL_ERROR = 2e-3

COMPANION_PROMPTS = ("an old lighthouse above green waves", "a kite")


class PipelineStages:
    """Runs the cases of one checkpoint folder through one Pipeline, loaded at the first case."""

    def __init__(self, model: Path, *, batched: bool, device: str) -> None:
        self.model = model
        self.batched = batched
        self.device = device
        self._pipeline: Pipeline | None = None

    def run(self, case: Case) -> list[StageReport]:
        """One report per stage; an error fails the stage that it came in and ends the case."""
        stages: list[StageReport] = []
        request = None
        with errors_fail(stages, (PREPARATION,)):
            pipeline = self._loaded()
            transformer = read_json(self.model / "transformer" / "config.json")
            request = mapping_of(case.pipeline).request(case, transformer)
        if request is not None:
            with errors_fail(stages, PIPELINE_STAGES):
                _CaseRun(case, request, pipeline, stages).run(self.batched)
        return stages

    def _loaded(self) -> Pipeline:
        if self._pipeline is None:
            config = ExecuteConfig(dtype="float32", device=self.device)
            self._pipeline = Pipeline.from_models(str(self.model), execute_config=config)
        return self._pipeline


class _CaseRun:
    """One case on its way; appends to ``stages`` in the order of PIPELINE_STAGES."""

    def __init__(self, case: Case, request: Request, pipeline: Pipeline, stages: list[StageReport]) -> None:
        self.case = case
        self.request = request
        self.mapping: CallMapping = mapping_of(case.pipeline)
        self.pipeline = pipeline
        self.stages = stages

    def run(self, batched: bool) -> None:
        embeddings = self.mapping.embeddings(self.case, self.request)
        with ExitStack() as open_runs:
            others = self._start_companions(open_runs) if batched else []
            run = open_runs.enter_context(start(self.pipeline, self.request, tuple(embeddings)))
            pairs = []
            for key, expected in embeddings.items():
                got = run.fetch(key)
                tensors = self.mapping.joined([got] if isinstance(got, Tensor) else list(got), expected)
                pairs += [(name, a, b) for a, (name, b) in zip(tensors, expected, strict=True)]
            self._judge(EMBEDDINGS, pairs)
            self._judge(NOISE, [(NOISE, run.peek()["latents"], self.mapping.initial_latents(self.case))])
            timesteps = self._step_to_the_end(run, others)
            self._judge_schedule(timesteps)
            result = run.finish()
        self._judge(LATENTS, [(LATENTS, result.latents, self.case.tensor("latents"))])
        decoded = result.pixels if result.video is None else result.video
        assert decoded is not None, "a decoded request has pixels"
        stride = self.case.output_stride
        pixels = decoded[..., ::stride, ::stride, :]
        self._judge(OUTPUT, [(OUTPUT, pixels, self.case.tensor("output"))], LARGEST_PIXEL_ERROR)

    def _start_companions(self, open_runs: ExitStack) -> list[PipelineRun]:
        """Two other requests, at steps 3 and 1 when the case joins; the first ends one step before the case."""
        steps = self.request.sample_config.steps
        assert steps is not None, "a mapping states the number of steps"
        first, second = (
            open_runs.enter_context(start(self.pipeline, companion(self.request, i, more), ()))
            for i, more in enumerate((2, 1))
        )
        self.pipeline.step([first])
        self.pipeline.step([first])
        self.pipeline.step([first, second])
        return [first, second]

    def _step_to_the_end(self, run: PipelineRun, others: list[PipelineRun]) -> list[float]:
        timesteps = []
        while run.steps_left:
            together = [other for other in others if other.steps_left]
            reports = self.pipeline.step([*together, run])
            timesteps += [report.timestep for report in reports if report.run == run.run_id]
            if len(timesteps) == 1:
                self._judge_first_output(run)
        return timesteps

    def _judge_first_output(self, run: PipelineRun) -> None:
        got, expected = run.peek()["prediction"], self.mapping.first_outputs(self.case, self.request)
        if got.shape[0] != len(expected):
            note = f"{got.shape[0]} guidance branches, expected {len(expected)}"
            self.stages.append(failed(FIRST_OUTPUT, note))
            return
        self._judge(FIRST_OUTPUT, [(name, a, b) for a, (name, b) in zip(got, expected, strict=True)])

    def _judge_schedule(self, timesteps: list[float]) -> None:
        for component, count in self._expected_calls(timesteps).items():
            recorded = self.case.calls.get(component, 0)
            if count != recorded:
                note = f"{count} calls of {component}, the reference made {recorded}"
                self.stages.append(failed(SCHEDULE, note))
                return
        expected = self.case.tensor("scheduler.timesteps")
        self._judge(SCHEDULE, [(SCHEDULE, torch.tensor(timesteps), expected)])

    def _expected_calls(self, timesteps: list[float]) -> Mapping[str, int]:
        """How often the reference calls each denoiser; of two experts each in its own part of the schedule."""
        builder = self.pipeline.family.context_builder(self.pipeline.pipeline_def, self.pipeline.checkpoint)
        boundary = builder.expert_boundary()
        if boundary is None:
            return self.mapping.denoiser_calls(self.request, len(timesteps))
        high = sum(timestep >= boundary for timestep in timesteps)
        parts = {"transformer": high, "transformer_2": len(timesteps) - high}
        return {name: self.mapping.denoiser_calls(self.request, n)["transformer"] for name, n in parts.items()}

    def _judge(self, name: str, pairs: list[tuple[str, Tensor, Tensor]], largest: float | None = None) -> None:
        self.stages.append(compare(name, pairs, TOLERANCES[name], largest))


def start(pipeline: Pipeline, request: Request, hold: tuple[TensorKey, ...]) -> PipelineRun:
    """Start ``request``, keeping the tensors of ``hold`` until they are fetched."""
    prepared = pipeline.request(
        request.prompt,
        prompt_negative=request.prompt_negative,
        sample_config=request.sample_config,
        runtime_config=request.runtime_config,
        extra_inputs=request.extra_inputs,
        feeds=request.feeds,
    )
    return pipeline.begin(prepared, hold=hold)


def companion(request: Request, index: int, more_steps: int) -> Request:
    """A request of the same shapes and guidance kind, with its own prompt, seed, guidance values and steps."""
    prompt = COMPANION_PROMPTS[index]
    config = request.sample_config
    assert config.steps is not None, "a mapping states the number of steps"
    guided = config.cfg_scale is not None and config.cfg_scale > 1
    return replace(
        request,
        prompt=prompt if isinstance(request.prompt, str) else [prompt] * request.num_samples,
        sample_config=replace(
            config,
            steps=config.steps + more_steps,
            guidance_scale=None if config.guidance_scale is None else config.guidance_scale + 0.7 * (index + 1),
            cfg_scale=config.cfg_scale + 0.9 * (index + 1) if guided and config.cfg_scale else config.cfg_scale,
        ),
        runtime_config=replace(request.runtime_config, seed=1000 * (index + 1)),
        feeds=None,
    )
