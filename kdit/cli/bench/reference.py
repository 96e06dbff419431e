"""The reference library's side: its pipeline as a user calls it, with clocks around its parts. Used by compare.py and
fresh.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from kdit.cli.bench.call import BenchCall, reference_arguments
from kdit.cli.bench.clock import DECODE, LOOP, TEXT, TOTAL, Sample

Call = Callable[..., object]


class _Autoencoder(Protocol):
    decode: Call


class _Pipeline(Protocol):
    """What is used of a DiffusionPipeline."""

    encode_prompt: Call
    vae: _Autoencoder
    components: dict[str, object]

    def __call__(self, **arguments: object) -> object: ...
    def set_progress_bar_config(self, *, disable: bool) -> None: ...


def load_reference(folder: Path, pipeline: str, dtype: str) -> _Pipeline:
    """The library's pipeline of that class, in ``dtype``, with its progress bar off and nothing else changed."""
    import diffusers

    cls = getattr(diffusers, pipeline)
    loaded = cast(_Pipeline, cls.from_pretrained(str(folder), torch_dtype=getattr(torch, dtype), local_files_only=True))
    loaded.set_progress_bar_config(disable=True)
    return loaded


def reference_weights(pipeline: _Pipeline) -> list[Tensor]:
    """Every parameter and buffer of every component."""
    models = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
    return [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]


def call_reference(
    pipeline: _Pipeline, call: BenchCall, after_step: Callable[..., dict[str, object]] | None = None
) -> Tensor:
    """Make the picture or video: pixels [B, (F,) H, W, 3]."""
    arguments = reference_arguments(call)
    if after_step is not None:
        arguments["callback_on_step_end"] = after_step
    output = pipeline(generator=torch.Generator().manual_seed(call.seed), output_type="np", **arguments)
    made = getattr(output, "images", None)
    return torch.as_tensor(cast(Tensor, getattr(output, "frames", None) if made is None else made))


class ReferenceSide:
    """A loaded pipeline whose ``encode_prompt`` and ``vae.decode`` note when they begin and end."""

    def __init__(self, folder: Path, pipeline: str, dtype: str) -> None:
        self.pipeline = load_reference(folder, pipeline, dtype)
        self._texts: list[tuple[float, float]] = []
        self._decodes: list[tuple[float, float]] = []
        self.pipeline.encode_prompt = _noting(self.pipeline.encode_prompt, self._texts)
        self.pipeline.vae.decode = _noting(self.pipeline.vae.decode, self._decodes)

    def run(self, call: BenchCall) -> Sample:
        """One request.

        text_encode: all of ``encode_prompt``, for both prompts. loop: from the end of the last of these calls to the
        beginning of ``vae.decode``, so with noise, schedule and all steps. decode: from there to the finished pixels.
        """
        self._texts.clear()
        self._decodes.clear()
        last: list[Tensor] = []

        def after_step(_pipe: object, _index: int, _time: object, tensors: dict[str, Tensor]) -> dict[str, object]:
            last[:] = [tensors["latents"]]
            return {}

        started = time.perf_counter()
        pixels = call_reference(self.pipeline, call, after_step)
        ended = time.perf_counter()
        assert self._texts and self._decodes and last, "the pipeline has its parts under the names known here"
        decode_began = self._decodes[0][0]
        seconds = {
            TEXT: sum(end - begin for begin, end in self._texts),
            LOOP: decode_began - self._texts[-1][1],
            DECODE: ended - decode_began,
            TOTAL: ended - started,
        }
        return Sample(seconds, last[0], pixels)


def _noting(call: Call, times: list[tuple[float, float]]) -> Call:
    def timed(*positional: object, **named: object) -> object:
        began = time.perf_counter()
        result = call(*positional, **named)
        times.append((began, time.perf_counter()))
        return result

    return timed
