"""Pipeline: a loaded model folder that makes pictures. The face of the library."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from kdit.collector import collector_paused
from kdit.config import CacheConfig, ExecuteConfig, ParallelConfig, RuntimeConfig, SampleConfig
from kdit.engine.engine import Engine
from kdit.errors import Cancelled, ConfigError, InputError
from kdit.generators.generator_runner import GeneratorRunner
from kdit.generators.registry import generator_def
from kdit.keys import IONodeType, RunId, TensorKey, family_of_model
from kdit.models.checkpoint import Checkpoint
from kdit.models.single_file.sources import Components
from kdit.models.weights.weight_files import raise_first
from kdit.nodes.core.step_report import StepReport
from kdit.nodes.infer.generate import GeneratorNode
from kdit.pipelines.cancel_token import CancelToken
from kdit.pipelines.checkpoint_faults import check_component_names, checkpoint_faults
from kdit.pipelines.dag import apply_feeds, topo_sort
from kdit.pipelines.expect import expect
from kdit.pipelines.extra_inputs import ExtraInputs
from kdit.pipelines.family_pipeline import FamilyPipeline
from kdit.pipelines.feeds import checked_feeds, spatial_feeds
from kdit.pipelines.loader_context import loader_context
from kdit.pipelines.long_prompts import refuse_long_prompts
from kdit.pipelines.memory import rows_that_fit
from kdit.pipelines.options import check_cache_config, check_execute_config, check_parallel_config, require
from kdit.pipelines.pipeline_def import PipelineDef
from kdit.pipelines.pipeline_defaults import PipelineDefaults
from kdit.pipelines.pipeline_run import PipelineRun
from kdit.pipelines.registry import pipeline_of
from kdit.pipelines.request import PipelineRequest, make_inputs, with_checkpoint_defaults
from kdit.pipelines.result import GenerateResult
from kdit.tensor.tensor_value import TensorData

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
        self.pipeline_def = family.build(checkpoint)
        self._graphs: dict[frozenset[TensorKey], PipelineDef] = {frozenset(): self.pipeline_def}
        self._node_ids = {node_def.node_id for node_def in self.pipeline_def.nodes}
        self._closed = self._loaded = False
        # A pipeline that is simply dropped gives its models back too.
        weakref.finalize(self, engine.release_later, self._node_ids).atexit = False
        self.model_hash = checkpoint.weight_hash()

    @classmethod
    def from_models(
        cls,
        path: str | Path,
        *,
        components: Components | None = None,
        execute_config: ExecuteConfig | None = None,
        parallel_config: ParallelConfig | None = None,
        engine: Engine | None = None,
    ) -> Pipeline:
        """Open a diffusers folder, a single file, or the built-in model "mini", and load its weights.

        ``components``: a diffusers folder that supplies what a file lacks; or component -> folder, file, or None to
        leave it out ("base": that folder). Named ones replace those of a folder too.

        Raises CheckpointError for files that cannot be used and UnsupportedOptionError for options that the
        family does not have, both before any weight is loaded.
        """
        pipeline = cls.open(
            path, components=components, execute_config=execute_config, parallel_config=parallel_config, engine=engine
        )
        pipeline.load_models()
        return pipeline

    @classmethod
    @collector_paused()
    def open(
        cls,
        path: str | Path,
        *,
        components: Components | None = None,
        execute_config: ExecuteConfig | None = None,
        parallel_config: ParallelConfig | None = None,
        engine: Engine | None = None,
    ) -> Pipeline:
        """Everything of ``from_models`` but loading: requests can be made (``request``), not run."""
        expect(execute_config, ExecuteConfig)
        expect(parallel_config, ParallelConfig)
        execute_config, parallel_config = execute_config or ExecuteConfig(), parallel_config or ParallelConfig()
        if not isinstance(path, str | Path):
            raise InputError(f"from_models takes a folder or the name of a built-in model, got {path!r}")
        checkpoint = Checkpoint.open(path, components)
        if execute_config.variant is not None:
            checkpoint = checkpoint.with_variant(execute_config.variant)
        family = pipeline_of(checkpoint)
        check_execute_config(family.network, execute_config)
        check_parallel_config(family.network, parallel_config)
        engine = _engine_for(engine, execute_config, parallel_config)
        raise_first(checkpoint_faults(checkpoint, family))
        check_component_names(execute_config, checkpoint)
        return cls(
            checkpoint,
            family,
            name=str(path),
            execute_config=execute_config,
            parallel_config=parallel_config,
            engine=engine,
        )

    @collector_paused()
    def load_models(self, *, cancel: CancelToken | None = None) -> None:
        """Run the graph's loaders; ``cancel`` stops between two of them with ``Cancelled``.

        If one fails, the models that came before it are given back.
        """
        self._check_open()
        try:
            for node_def in topo_sort(self.pipeline_def):
                if node_def.node_type is IONodeType.LOAD_MODEL:
                    if cancel is not None and cancel.is_set:
                        raise Cancelled("cancelled while loading")
                    context = loader_context(node_def, self.checkpoint, self.family, self.execute_config)
                    self.engine.run_node(node_def, {}, context)
        except BaseException:
            self.engine.forget_nodes(tuple(self._node_ids))
            raise
        self._loaded = True

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
        request = self.request(
            prompt,
            prompt_negative=prompt_negative,
            sample_config=sample_config,
            runtime_config=runtime_config,
            cache_config=cache_config,
            extra_inputs=extra_inputs,
            feeds=feeds,
        )
        return self.run(request, callback=callback, cancel=cancel)

    def request(
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
        expect(cache_config, list)
        caches = self.execute_config.cache_config if cache_config is None else tuple(cache_config)
        check_cache_config(self.family.network, caches)
        expect(sample_config, SampleConfig)
        expect(runtime_config, RuntimeConfig)
        expect(extra_inputs, ExtraInputs)
        inputs, notices = make_inputs(
            self._defaults_for(extra_inputs),
            self.execute_config,
            prompt,
            prompt_negative,
            sample_config or SampleConfig(),
            runtime_config or RuntimeConfig(),
            self._model_settings(),
            network=self.family.network,
            output=self.family.output,
            extra_inputs=extra_inputs,
            changes_image=self._changes_image(sample_config, extra_inputs, feeds),
            cache_config=caches,
        )
        fed = checked_feeds(feeds)
        if inputs.negative_prompts is None and fed.pop(TensorKey.NEGATIVE, None) is not None:
            notices.append("NEGATIVE was fed but `cfg_scale` is 1 or less, so it is not used")
        # Of what the loop's node could take, a family may read less.
        generator_def(self.family.network).check_inputs(key for key in fed if key in GeneratorNode.input_defs)
        inputs.settings["fed"] = sorted(key.value for key in fed)
        if TensorKey.LATENTS in fed:
            inputs.settings["steps"] = 0  # what is fed is only decoded
        builder = self.family.context_builder(self._graph_with(fed), self.checkpoint)
        builder.prepare_generate_inputs(
            inputs,
            extra_inputs,
            default_settings=self.defaults,
            engine=self.engine,
            vae_model_key=self.family.vae,
        )
        builder.check_feeds(inputs)
        if not self._loaded:  # else TEXT_ENCODE, which comes first, counts with the tokenizers that are in memory
            refuse_long_prompts(builder, inputs, self.checkpoint, self.family)
        notices += builder.notices(inputs)
        assert inputs.runtime_config.size is not None and inputs.sample_config.steps is not None
        shape = self.family.latents.shape(self.checkpoint, inputs.runtime_config.size, inputs.runtime_config.frame_num)
        steps = inputs.sample_config.steps
        floor = partial(self.family.memory_floor, self.checkpoint, inputs)
        inputs = replace(inputs, rows_per_forward=rows_that_fit(floor, inputs, self._device(), pending=self._pending()))
        inputs.settings["rows_per_forward"] = inputs.rows_per_forward
        self._try_schedule(steps, shape)
        request = PipelineRequest(
            owner=self,
            builder=builder,
            inputs=inputs,
            feeds=spatial_feeds(fed, inputs, shape, self.family.latents),
            notices=tuple(notices),
        )
        request.check_file_texts()
        return request

    def begin(self, request: PipelineRequest, *, hold: Collection[TensorKey] = ()) -> PipelineRun:
        """Run a request up to its first denoising step.

        ``hold`` names tensors of the graph that stay readable through ``PipelineRun.fetch``.
        """
        expect(request, PipelineRequest)
        if request.owner is not self:
            raise InputError("a request is run by the pipeline whose request(...) made it; this is another's")
        self._check_open()
        if not self._loaded:
            raise InputError(f"the weights of {self.name} are not loaded yet; call load_models() first")
        run_id = RunId(f"run-{next(_run_numbers)}")
        return PipelineRun(run_id, self, request, hold=hold)

    def run(
        self,
        request: PipelineRequest,
        *,
        callback: Callable[[StepReport], None] | None = None,
        cancel: CancelToken | None = None,
    ) -> GenerateResult:
        """Run a request to its end."""
        if callback is not None and not callable(callback):
            raise InputError(f"callback must be a function of a StepReport, got {callback!r}")
        if cancel is not None and not isinstance(cancel, CancelToken):
            raise InputError(f"cancel must be a CancelToken, got {cancel!r}")
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
        self._closed = True
        self.engine.forget_nodes(tuple(self._node_ids))

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
        expect(runs, (list, tuple))
        for run in runs:
            expect(run, PipelineRun)
        if not runs or any(run.steps_left == 0 for run in runs):
            raise InputError("step takes one run at least, each with steps left")
        first = runs[0]
        if any(run.engine is not first.engine or run.generate_node != first.generate_node for run in runs):
            raise InputError("runs that share a step must come from one Pipeline")
        assert first.generate_node is not None
        if len(runs) > 1:
            require(first.network, "step batches")
        reports = first.engine.step_generate(first.generate_node, tuple(run.run_id for run in runs))
        for run, report in zip(runs, reports, strict=True):
            run.count_step(report)
        return reports

    def _defaults_for(self, extra: ExtraInputs | None) -> PipelineDefaults:
        """The defaults, with the size that follows from the inputs. Raises InputError for another family's inputs."""
        takes = self.family.extra_inputs
        if extra is None:
            return self.defaults
        if takes is None or not isinstance(extra, takes):
            title = family_of_model(self.family.network).title
            expected = "none" if takes is None else takes.__name__
            raise InputError(f"{title} ({self.family.key.value}) takes {expected}, got {type(extra).__name__}")
        size = self.family.default_size(extra, self.defaults)
        return self.defaults if size is None else replace(self.defaults, size=size)

    def _changes_image(
        self, sample: SampleConfig | None, extra: ExtraInputs | None, feeds: Mapping[TensorKey, TensorData] | None
    ) -> bool:
        """Whether the loop begins at an image: one that is given, or fed latents with a ``strength``."""
        if extra is not None and self.family.changes_image(extra):
            return True
        return sample is not None and sample.strength is not None and TensorKey.BASE_LATENT in (feeds or {})

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(f"this pipeline of {self.name} is closed; open another with Pipeline.from_models")

    def _graph_with(self, fed: Mapping[TensorKey, TensorData]) -> PipelineDef:
        """The graph with these tensors fed. Kept, so that executors need one node per feed and not one per call."""
        keys = frozenset(fed)
        if keys not in self._graphs:
            self._graphs[keys] = apply_feeds(self.pipeline_def, keys)
            self._node_ids.update(node_def.node_id for node_def in self._graphs[keys].nodes)
        return self._graphs[keys]

    def _try_schedule(self, num_steps: int, shape: tuple[int, ...]) -> None:
        """A schedule that cannot be made must fail here, not after the text was encoded."""
        runner = GeneratorRunner(generator_def(self.family.network))
        runner.schedule(self.checkpoint.scheduler_config(), num_steps, shape)

    def _pending(self) -> int:
        """Bytes of weights that are not loaded yet."""
        itemsize: int = getattr(torch, self.execute_config.dtype).itemsize
        return 0 if self._loaded else self.checkpoint.num_parameters() * itemsize

    def _device(self) -> torch.device:
        return self.engine.executors[0].device_info.compute_device

    def _model_settings(self) -> dict[str, object]:
        info = self.checkpoint.info
        return {
            "model": self.name,
            "model_version": info.version,
            "model_hash": self.model_hash,
            **({"components": dict(self.checkpoint.supplied)} if self.checkpoint.supplied else {}),
            "pipeline": self.family.key.value,
        }


def _engine_for(engine: Engine | None, execute_config: ExecuteConfig, parallel_config: ParallelConfig) -> Engine:
    """The given engine, if it is what the configs ask for, else the default one or one for the stated device."""
    if engine is None:
        device = execute_config.device
        return Engine.get_default() if device is None else Engine.single(device, parallel_config)
    info = engine.executors[0].device_info
    if execute_config.device is not None and torch.device(execute_config.device) != info.compute_device:
        raise ConfigError(
            f"`ExecuteConfig.device` is {execute_config.device}, the given engine runs on {info.compute_device}"
        )
    if parallel_config.world_size != info.world_size:
        raise ConfigError(
            f"ParallelConfig asks for {parallel_config.world_size} ranks, the given engine has {info.world_size}"
        )
    return engine
