"""FamilyPipeline: what a family's file in ``pipelines/defs`` declares about one of its pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from kdit.keys import ModelKey, PipelineKey, family_of_pipeline
from kdit.models.checkpoint import Checkpoint
from kdit.models.rows import LatentShape
from kdit.pipelines.context_builder import ContextBuilder
from kdit.pipelines.extra_inputs import ExtraInputs, MediaInputs
from kdit.pipelines.generate_inputs import PipelineGenerateInputs
from kdit.pipelines.pipeline_def import PipelineDef
from kdit.pipelines.pipeline_defaults import PipelineDefaults


@dataclass(frozen=True)
class Component:
    """Where a checkpoint folder keeps a model."""

    folder: str
    tokenizer: str | None = None  # folder of a text encoder's tokenizer or of an image encoder's processor
    optional: bool = False  # ``FamilyPipeline.build`` makes a graph without it where the checkpoint lacks it


class LatentForm(Protocol):
    """The shape of a family's latents, and their public form: as diffusers hands them out and takes them."""

    def shape(self, checkpoint: Checkpoint, size: tuple[int, int], frame_num: int | None) -> LatentShape:
        """Shape of one sample's latents on the pins of the graph."""

    def to_public(self, latents: Tensor) -> Tensor:
        """[B, *shape] -> the public form."""

    def from_public(self, latents: Tensor, shape: LatentShape) -> Tensor:
        """The public form, or [B, *shape] already -> [B, *shape]. Raises InputError on anything else."""


def accept_any(checkpoint: Checkpoint) -> bool:
    """For a pipeline that is the only one of its class of folders."""
    return True


def no_default_size(extra: ExtraInputs, defaults: PipelineDefaults) -> tuple[int, int] | None:
    """For a pipeline whose size does not follow from its inputs."""
    return None


def never(extra: ExtraInputs) -> bool:
    """For a pipeline whose inputs are no image to be changed."""
    return False


@dataclass(frozen=True, kw_only=True)
class FamilyPipeline:
    """One pipeline: its graph, where its models lie, its defaults."""

    key: PipelineKey
    network: ModelKey  # whose GeneratorDef runs the loop
    vae: ModelKey
    components: Mapping[ModelKey, Component]
    build: Callable[[Checkpoint], PipelineDef]
    defaults: Callable[[Checkpoint], PipelineDefaults]
    latents: LatentForm
    memory_floor: Callable[[Checkpoint, PipelineGenerateInputs, int], int]
    """(checkpoint, inputs, rows in one forward) -> bytes a request needs at the very least beside the weights."""
    context_builder: type[ContextBuilder]
    output: Literal["image", "video"] = "image"
    accepts: Callable[[Checkpoint], bool] = accept_any
    extra_inputs: type[ExtraInputs] | None = None  # None: it takes none
    from_media: Callable[[MediaInputs], ExtraInputs] | None = None  # None: it takes no files
    changes_image: Callable[[ExtraInputs], bool] = never  # whether the loop begins at an image, by ``strength``
    default_size: Callable[[ExtraInputs, PipelineDefaults], tuple[int, int] | None] = no_default_size

    def take_media(self, media: MediaInputs) -> ExtraInputs | None:
        """The pipeline's own inputs for the files of a command line. Raises InputError for what it does not take."""
        if media == MediaInputs():
            return None
        if self.from_media is None:
            media.refuse(f"{family_of_pipeline(self.key).title} ({self.key.value})")
        assert self.from_media is not None
        return self.from_media(media)
