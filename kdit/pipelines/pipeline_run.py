"""PipelineRun: one request on its way through the graph. Made by ``Pipeline.begin``."""

from __future__ import annotations

import copy
import logging
import time
import weakref
from collections.abc import Collection
from types import TracebackType
from typing import Protocol, Self

from torch import Tensor

from kdit.engine.engine import Engine
from kdit.errors import InputError
from kdit.keys import InferNodeType, IONodeType, RunId, TensorKey
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.core.pin_def import OutputPins
from kdit.nodes.core.step_report import StepReport
from kdit.pipelines.dag import compute_input_pins, count_consumers
from kdit.pipelines.family_pipeline import FamilyPipeline
from kdit.pipelines.request import PipelineRequest
from kdit.pipelines.result import GenerateResult
from kdit.tensor.tensor_pool_key import TensorPoolKey
from kdit.tensor.tensor_value import TensorData

logger = logging.getLogger(__name__)


class RunOwner(Protocol):
    """What a run needs of its Pipeline."""

    engine: Engine
    family: FamilyPipeline


class PipelineRun:
    """Runs the nodes of one request: up to the denoising loop when made, the loop step by step, the rest in
    ``finish``. A context manager; ``close`` frees every tensor of the run, however it ended.
    """

    def __init__(
        self,
        run_id: RunId,
        owner: RunOwner,
        request: PipelineRequest,
        *,
        hold: Collection[TensorKey] = (),
    ) -> None:
        self._owner = owner  # a pipeline gives its models back when nobody holds it; a run of it does
        self.run_id, self.engine, self.inputs = run_id, owner.engine, request.inputs
        self.network = owner.family.network
        self.notices: tuple[str, ...] = ()  # those that were told
        self._unused = request.notices
        # A run that is simply dropped frees its tensors too.
        weakref.finalize(self, owner.engine.release_later, run_id).atexit = False
        self._builder, self._latent_form = request.builder, owner.family.latents
        self._outputs: dict[int, OutputPins] = {}
        self._timings: dict[str, float] = {}
        self._started = time.perf_counter()
        self._done = 0
        self._finished = False
        self._num_steps = 0
        builder, inputs = request.builder, request.inputs
        graph = builder.pipeline_def
        self._nodes = builder.active_nodes(inputs)
        loops = [n for n in self._nodes if n.node_type is InferNodeType.GENERATE]
        self.generate_node: NodeDef | None = loops[0] if loops else None
        try:
            for key, consumers in count_consumers(graph, self._nodes, held=hold).items():
                self.engine.register_tensor(key, consumers, run=run_id)
            self.engine.feed_tensors(request.feeds, run=run_id)
            self._run_nodes_before_loop()
            self._tell_notices()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_steps(self) -> int:
        """Steps of the whole loop."""
        return self._num_steps

    @property
    def steps_left(self) -> int:
        """Steps still to run; 0 once the run is over."""
        return 0 if self._finished else self._num_steps - self._done

    def fetch(self, key: TensorKey) -> TensorData:
        """A tensor that the run was asked to hold. Raises PinError if no node of the run wrote it."""
        return self.engine.get_tensor(key, run=self.run_id)

    def peek(self) -> dict[str, Tensor]:
        """Latents in their public form and the schedule; after the first step also the last ``prediction``
        [branches, B, ...], positive branch first.
        """
        if self.generate_node is None:
            raise InputError("this run has no denoising loop to look into")
        seen = self.engine.peek_generate(self.generate_node, run=self.run_id)
        return {**seen, "latents": self._latent_form.to_public(seen["latents"])}

    def count_step(self, report: StepReport) -> None:
        """Called by ``Pipeline.step`` for each step of this run."""
        self._done = report.step_index + 1
        self._add_time("denoise", report.seconds)

    def finish(self) -> GenerateResult:
        """Close the loop, run the remaining nodes, collect the result and free the run."""
        if self._finished:
            raise InputError(f"{self.run_id} is over; start another")
        if self.steps_left:
            raise InputError(f"{self.steps_left} of {self.num_steps} steps are left; step the run to its end first")
        try:
            if self.generate_node is not None:
                self._outputs[self.generate_node.node_id] = self.engine.close_generate(
                    self.generate_node, run=self.run_id
                )
            while self._nodes:
                self._run_node(self._nodes.pop(0))
            self._tell_notices()
            return self._collect()
        finally:
            self.close()

    def close(self) -> None:
        """Free everything of this run, on every rank. May be called at any time and any number of times."""
        self._finished = True
        self.engine.end_run(self.run_id)

    def _run_nodes_before_loop(self) -> None:
        while self._nodes:
            node_def = self._nodes.pop(0)
            if node_def is not self.generate_node:
                self._run_node(node_def)
                continue
            started = time.perf_counter()
            pins = compute_input_pins(node_def, self._builder.pipeline_def.edges, self._outputs)
            context = self._builder.build_context(node_def, self.inputs)
            self.engine.open_generate(node_def, pins, context, run=self.run_id)
            self._num_steps = self.engine.steps_left(node_def, run=self.run_id)
            self._add_time("prepare", time.perf_counter() - started)
            return

    def _run_node(self, node_def: NodeDef) -> None:
        started = time.perf_counter()
        pins = compute_input_pins(node_def, self._builder.pipeline_def.edges, self._outputs)
        context = self._builder.build_context(node_def, self.inputs)
        self._outputs[node_def.node_id] = self.engine.run_node(node_def, pins, context, run=self.run_id)
        self._add_time(node_def.node_type.value, time.perf_counter() - started)

    def _add_time(self, stage: str, seconds: float) -> None:
        self._timings[stage] = self._timings.get(stage, 0.0) + seconds

    def _tell_notices(self) -> None:
        """Log what was asked for and had no effect, and what nodes have told, once each."""
        for notice in dict.fromkeys((*self._unused, *self.engine.notices(self.run_id))):
            if notice not in self.notices:
                self.notices = (*self.notices, notice)
                logger.warning("%s: %s", self.run_id, notice)

    def _collect(self) -> GenerateResult:
        pixels, video = self._fetched(TensorKey.IMAGE), self._fetched(TensorKey.VIDEO)
        latents = self._fetched(TensorKey.LATENTS)
        assert latents is not None, "the graph fetches no latents"
        return GenerateResult(
            pixels=video[:, 0] if video is not None and video.shape[1] == 1 else pixels,
            video=video,
            latents=self._latent_form.to_public(latents),
            seeds=self.inputs.seeds,
            settings=copy.deepcopy(self.inputs.settings),  # a request may run again
            timings={**self._timings, "total": time.perf_counter() - self._started},
            notices=self.notices,
        )

    def _fetched(self, key: TensorKey) -> Tensor | None:
        """What the graph's FETCH_TENSOR node for ``key`` brought out."""
        for node_def in self._builder.pipeline_def.nodes:
            if node_def.node_type is IONodeType.FETCH_TENSOR and key in self._outputs.get(node_def.node_id, {}):
                data = self.engine.get_tensor(TensorPoolKey(node_def.node_id, key), run=self.run_id)
                assert isinstance(data, Tensor)
                return data.clone()  # made in inference mode, which would forbid the caller to write into it
        return None
