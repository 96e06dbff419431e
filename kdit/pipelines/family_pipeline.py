"""FamilyPipeline: what a family's file in ``pipelines/defs`` declares about one of its pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kdit.keys import ModelKey, PipelineKey
from kdit.models.checkpoint import Checkpoint
from kdit.models.rows import LatentShape
from kdit.pipelines.context_builder import ContextBuilder
from kdit.pipelines.generate_inputs import PipelineGenerateInputs
from kdit.pipelines.pipeline_def import PipelineDef
from kdit.pipelines.pipeline_defaults import PipelineDefaults


@dataclass(frozen=True)
class Component:
    """Where a checkpoint folder keeps a model."""

    folder: str
    tokenizer: str | None = None


class LatentForm(Protocol):
    """The shape of a family's latents, and their public form: as diffusers hands them out and takes them."""

    def shape(self, checkpoint: Checkpoint, size: tuple[int, int], frame_num: int | None) -> LatentShape:
        """Shape of one sample's latents on the pins of the graph."""

    def to_public(self, latents: Tensor) -> Tensor:
        """[B, *shape] -> the public form."""

    def from_public(self, latents: Tensor, shape: LatentShape) -> Tensor:
        """The public form, or [B, *shape] already -> [B, *shape]. Raises InputError on anything else."""


@dataclass(frozen=True, kw_only=True)
class FamilyPipeline:
    """One pipeline: its graph, where its models lie, its defaults."""

    key: PipelineKey
    network: ModelKey
    vae: ModelKey
    components: Mapping[ModelKey, Component]
    build: Callable[[], PipelineDef]
    defaults: Callable[[Checkpoint], PipelineDefaults]
    latents: LatentForm
    memory_floor: Callable[[Checkpoint, PipelineGenerateInputs], int]  # bytes a request needs at the very least
    context_builder: type[ContextBuilder]
