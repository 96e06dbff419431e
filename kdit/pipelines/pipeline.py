"""Pipeline: a loaded model folder that makes pictures. The face of the library."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Self

from kdit.config import CacheConfig, ExecuteConfig, ParallelConfig, RuntimeConfig, SampleConfig
from kdit.engine.engine import Engine
from kdit.errors import Cancelled, InputError
from kdit.keys import IONodeType, RunId, TensorKey
from kdit.models.checkpoint import Checkpoint
from kdit.nodes.core.step_report import StepReport
from kdit.pipelines.cancel_token import CancelToken
from kdit.pipelines.dag import apply_feeds, topo_sort
from kdit.pipelines.extra_inputs import ExtraInputs
from kdit.pipelines.family_pipeline import FamilyPipeline
from kdit.pipelines.loader_context import loader_context
from kdit.pipelines.options import check_cache_config, check_execute_config, check_parallel_config
from kdit.pipelines.pipeline_defaults import PipelineDefaults
from kdit.pipelines.pipeline_run import PipelineRun
from kdit.pipelines.registry import family_pipeline
from kdit.pipelines.request import PipelineRequest, make_inputs, spatial_feeds, with_checkpoint_defaults
from kdit.pipelines.result import GenerateResult
from kdit.tensor.tensor_value import TensorData

logger = logging.getLogger(__name__)

_run_numbers = itertools.count(1)


class Pipeline:
    """One checkpoint, its graph and the engine that runs it. Make it with ``from_models``."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: FamilyPipeline,
        *,
        name: str,
        execute_config: ExecuteConfig,
        parallel_config: ParallelConfig,
        engine: Engine,
    ) -> None:
        self.checkpoint, self.family, self.name = checkpoint, family, name
        self.execute_config, self.parallel_config, self.engine = execute_config, parallel_config, engine
        self.defaults: PipelineDefaults = with_checkpoint_defaults(family.defaults(checkpoint), checkpoint)
        self.pipeline_def = family.build()
        self.model_hash = checkpoint.weight_hash()
        self.load_seconds = 0.0

    @classmethod
    def from_models(
        cls,
        path: str | Path,
        *,
        execute_config: ExecuteConfig | None = None,
        parallel_config: ParallelConfig | None = None,
        engine: Engine | None = None,
    ) -> Pipeline:
        """Open a diffusers folder, or the built-in model "mini", and load its weights.

        Raises CheckpointError for files that cannot be used and UnsupportedOptionError for options that the
        family does not have, both before any weight is loaded.
        """
        pipeline = cls.open(path, execute_config=execute_config, parallel_config=parallel_config, engine=engine)
        pipeline.load_models()
        return pipeline

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        execute_config: ExecuteConfig | None = None,
        parallel_config: ParallelConfig | None = None,
        engine: Engine | None = None,
    ) -> Pipeline:
        """Everything of ``from_models`` but loading: requests can be checked (``prepare``), not run."""
        execute_config, parallel_config = execute_config or ExecuteConfig(), parallel_config or ParallelConfig()
        checkpoint = Checkpoint.open(path)
        family = family_pipeline(checkpoint.pipeline_key())
        check_execute_config(family.network, execute_config)
        check_parallel_config(family.network, parallel_config)
        if engine is None:
            device = execute_config.device
            engine = Engine.get_default() if device is None else Engine.single(device, parallel_config)
        checkpoint.check()
        return cls(
            checkpoint,
            family,
            name=str(path),
            execute_config=execute_config,
            parallel_config=parallel_config,
            engine=engine,
        )

    def load_models(self) -> None:
        """Run the graph's loaders. If one fails, the models that came before it are given back."""
        started = perf_counter()
        try:
            for node_def in topo_sort(self.pipeline_def):
                if node_def.node_type is IONodeType.LOAD_MODEL:
                    context = loader_context(node_def, self.checkpoint, self.family, self.execute_config)
                    self.engine.run_node(node_def, {}, context)
        except BaseException:
            self.close()
            raise
        self.load_seconds = perf_counter() - started

    def generate(
        self,
        prompt: str | list[str],
        *,
        prompt_negative: str | list[str] | None = None,
        sample_config: SampleConfig | None = None,
        runtime_config: RuntimeConfig | None = None,
        cache_config: list[CacheConfig] | None = None,
        extra_inputs: ExtraInputs | None = None,
        feeds: Mapping[TensorKey, TensorData] | None = None,
        callback: Callable[[StepReport], None] | None = None,
        cancel: CancelToken | None = None,
    ) -> GenerateResult:
        """Make one picture per prompt.

        ``prompt_negative`` counts while ``cfg_scale`` is above 1; without one it is the empty text.
        ``feeds`` replaces tensors of the graph: prompt embeddings, noise, latents. ``callback`` hears of every
        step; ``cancel`` stops the request between two steps with ``Cancelled``. Raises InputError for a
        request that cannot be made and NonFiniteError when NaN or infinity appears.
        """
        request = self.prepare(
            prompt,
            prompt_negative=prompt_negative,
            sample_config=sample_config,
            runtime_config=runtime_config,
            cache_config=cache_config,
            extra_inputs=extra_inputs,
            feeds=feeds,
        )
        return self.run(request, callback=callback, cancel=cancel)

    def start(
        self,
        prompt: str | list[str],
        *,
        prompt_negative: str | list[str] | None = None,
        sample_config: SampleConfig | None = None,
        runtime_config: RuntimeConfig | None = None,
        cache_config: list[CacheConfig] | None = None,
        extra_inputs: ExtraInputs | None = None,
        feeds: Mapping[TensorKey, TensorData] | None = None,
        hold: Collection[TensorKey] = (),
    ) -> PipelineRun:
        """Begin a request as ``generate`` does, and stop before its first denoising step.

        ``hold`` names tensors of the graph that stay readable through ``PipelineRun.fetch``.
        """
        request = self.prepare(
            prompt,
            prompt_negative=prompt_negative,
            sample_config=sample_config,
            runtime_config=runtime_config,
            cache_config=cache_config,
            extra_inputs=extra_inputs,
            feeds=feeds,
        )
        return self.begin(request, hold=hold)

    def prepare(
        self,
        prompt: str | list[str],
        *,
        prompt_negative: str | list[str] | None = None,
        sample_config: SampleConfig | None = None,
        runtime_config: RuntimeConfig | None = None,
        cache_config: list[CacheConfig] | None = None,
        extra_inputs: ExtraInputs | None = None,
        feeds: Mapping[TensorKey, TensorData] | None = None,
    ) -> PipelineRequest:
        """Check a request and fill in its defaults. Needs no loaded weights."""
        check_cache_config(self.family.network, cache_config)
        inputs, notices = make_inputs(
            self.defaults,
            self.execute_config,
            prompt,
            prompt_negative,
            sample_config or SampleConfig(),
            runtime_config or RuntimeConfig(),
            self._model_settings(),
            network=self.family.network,
        )
        fed = dict(feeds or {})
        if inputs.negative_prompts is None and fed.pop(TensorKey.NEGATIVE, None) is not None:
            notices.append("NEGATIVE was fed but cfg_scale is 1 or less, so it is not used")
        graph = apply_feeds(self.pipeline_def, frozenset(fed)) if fed else self.pipeline_def
        builder = self.family.context_builder(graph, self.checkpoint)
        builder.prepare_generate_inputs(
            inputs,
            extra_inputs,
            default_settings=self.defaults,
            engine=self.engine,
            vae_model_key=self.family.vae,
        )
        return PipelineRequest(
            builder=builder,
            inputs=inputs,
            feeds=spatial_feeds(fed, inputs, self.checkpoint, self.family.latents),
            notices=tuple(notices),
        )

    def begin(self, request: PipelineRequest, *, hold: Collection[TensorKey] = ()) -> PipelineRun:
        """Run a request up to its first denoising step."""
        for notice in request.notices:
            logger.warning("%s", notice)
        run_id = RunId(f"run-{next(_run_numbers)}")
        return PipelineRun(run_id, self.engine, request, self.family.latents, hold=hold)

    def run(
        self,
        request: PipelineRequest,
        *,
        callback: Callable[[StepReport], None] | None = None,
        cancel: CancelToken | None = None,
    ) -> GenerateResult:
        """Run a request to its end."""
        with self.begin(request) as run:
            while run.steps_left:
                if cancel is not None and cancel.is_set:
                    raise Cancelled(f"cancelled after step {run.num_steps - run.steps_left} of {run.num_steps}")
                (report,) = self.step([run])
                if callback is not None:
                    callback(report)
            return run.finish()

    def close(self) -> None:
        """Give the memory of the loaded models back. The pipeline cannot be used afterwards."""
        self.engine.forget_nodes([node_def.node_id for node_def in self.pipeline_def.nodes])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def step(runs: Sequence[PipelineRun]) -> tuple[StepReport, ...]:
        """One denoising step of every run, in one forward.

        The runs must come from one Pipeline and have steps left; they may stand at different steps and have
        different prompts, seeds, step counts and guidance values. Raises InputError if their shapes differ.
        """
        if not runs or any(run.steps_left == 0 for run in runs):
            raise InputError("step needs at least one run, each with steps left")
        first = runs[0]
        if any(run.engine is not first.engine or run.generate_node != first.generate_node for run in runs):
            raise InputError("runs that share a step must come from one Pipeline")
        assert first.generate_node is not None
        reports = first.engine.step_generate(first.generate_node, tuple(run.run_id for run in runs))
        for run, report in zip(runs, reports, strict=True):
            run.count_step(report.seconds)
        return reports

    def _model_settings(self) -> dict[str, object]:
        info = self.checkpoint.info
        return {
            "model": self.name,
            "model_version": info.version,
            "model_hash": self.model_hash,
            "pipeline": self.family.key.value,
        }
