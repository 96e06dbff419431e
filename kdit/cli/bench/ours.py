"""kdit's side: a pipeline as a user calls it, timed stage by stage. Used by compare.py and fresh.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn

from kdit.cli.bench.call import BenchCall
from kdit.cli.bench.clock import DECODE, LOOP, TEXT, TOTAL, Sample
from kdit.cli.bench.options import BenchOptions
from kdit.config import ExecuteConfig, RuntimeConfig, SampleConfig
from kdit.keys import InferNodeType
from kdit.models.network import Network
from kdit.models.text_encoder import TextEncoder
from kdit.pipelines.pipeline import Pipeline
from kdit.pipelines.request import PipelineRequest

PREPARE = "prepare"


def open_pipeline(folder: str | Path, dtype: str) -> Pipeline:
    """The pipeline on the CPU, not loaded yet."""
    return Pipeline.open(folder, execute_config=ExecuteConfig(dtype=dtype, device="cpu"))


def effective_call(pipeline: Pipeline, options: BenchOptions) -> BenchCall:
    """The options with this model's defaults. Raises InputError for what the model cannot do."""
    request = pipeline.request(
        options.prompt,
        sample_config=SampleConfig(
            steps=options.steps, cfg_scale=options.cfg, max_sequence_length=options.max_sequence_length
        ),
        runtime_config=RuntimeConfig(seed=options.seed, size=options.size, frame_num=options.frames),
    )
    inputs = request.inputs
    sample, runtime = inputs.sample_config, inputs.runtime_config
    assert sample.steps and sample.max_sequence_length and runtime.size and sample.cfg_scale is not None
    return BenchCall(
        pipeline=pipeline.checkpoint.pipeline_class,
        prompt=options.prompt,
        negative=None if inputs.negative_prompts is None else inputs.negative_prompts[0],
        steps=sample.steps,
        cfg_scale=sample.cfg_scale,
        cfg_scale_2=sample.cfg_scale_2,
        guidance_scale=sample.guidance_scale,
        max_sequence_length=sample.max_sequence_length,
        size=runtime.size,
        frames=runtime.frame_num,
        seed=options.seed,
    )


def make_request(pipeline: Pipeline, call: BenchCall) -> PipelineRequest:
    """The call as a request."""
    return pipeline.request(
        call.prompt,
        prompt_negative=call.negative,
        sample_config=SampleConfig(
            steps=call.steps,
            cfg_scale=call.cfg_scale,
            cfg_scale_2=call.cfg_scale_2,
            guidance_scale=call.guidance_scale,
            max_sequence_length=call.max_sequence_length,
        ),
        runtime_config=RuntimeConfig(seed=call.seed, size=call.size, frame_num=call.frames),
    )


class OwnSide:
    """A loaded pipeline."""

    def __init__(self, folder: str | Path, dtype: str) -> None:
        self.pipeline = open_pipeline(folder, dtype)
        self.pipeline.load_models()
        self.resident: tuple[int, int] | None = None  # of the last run: bytes of the networks in its loop, and in all

    def run(self, call: BenchCall, *, look: bool = False) -> Sample:
        """One request, its checks included.

        text_encode: the TEXT_ENCODE nodes. loop: everything else up to the end of the last step, preparation
        included; that alone is also given. decode: from there to the finished pixels.
        With ``look``, ``resident`` is taken in the loop.
        """
        started = time.perf_counter()
        with self.pipeline.begin(make_request(self.pipeline, call)) as run:
            while run.steps_left:
                self.pipeline.step([run])
                if look:
                    self.resident = resident_bytes(networks(self.pipeline))
            loop_ended = time.perf_counter()
            result = run.finish()
        ended = time.perf_counter()
        text = result.timings.get(InferNodeType.TEXT_ENCODE.value, 0.0)
        seconds = {
            TEXT: text,
            LOOP: loop_ended - started - text,
            DECODE: ended - loop_ended,
            TOTAL: ended - started,
            PREPARE: result.timings.get(PREPARE, 0.0),
        }
        pixels = result.pixels if result.video is None else result.video
        assert pixels is not None, "a decoded request has pixels"
        return Sample(seconds, result.latents, pixels)


def modules(pipeline: Pipeline) -> Iterator[nn.Module]:
    """Every model that the pipeline has loaded."""
    for model in pipeline.engine.models():
        found = model.model if isinstance(model, TextEncoder) else model
        if isinstance(found, nn.Module):
            yield found


def networks(pipeline: Pipeline) -> list[Network]:
    """The diffusion transformers among them."""
    return [module for module in modules(pipeline) if isinstance(module, Network)]


def own_weights(pipeline: Pipeline) -> list[Tensor]:
    """Every parameter and buffer of every model that is held in memory."""
    return [t for model in modules(pipeline) for t in (*model.parameters(), *model.buffers()) if not t.is_meta]


def resident_bytes(nets: list[Network]) -> tuple[int, int]:
    """Bytes of the parameters that have storage, and of all; those without count as the network's dtype."""
    sizes = [
        (p.is_meta, p.numel() * (net.dtype.itemsize if p.is_meta else p.element_size()))
        for net in nets
        for p in net.parameters()
    ]
    return sum(size for is_meta, size in sizes if not is_meta), sum(size for _, size in sizes)
