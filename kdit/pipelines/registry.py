"""Finds the FamilyPipeline of a checkpoint by importing its family's module when it is first asked for."""

from __future__ import annotations

from importlib import import_module

from kdit.errors import CheckpointError, RegistryError
from kdit.keys import PipelineKey, family_of_pipeline
from kdit.models.checkpoint import INDEX_FILE, Checkpoint
from kdit.pipelines.family_pipeline import FamilyPipeline


def family_pipeline(key: PipelineKey) -> FamilyPipeline:
    """``kdit.pipelines.defs.<family>`` lists its pipelines in ``PIPELINES``."""
    entry = family_of_pipeline(key)
    pipelines: tuple[FamilyPipeline, ...] = import_module(f"kdit.pipelines.defs.{entry.name}").PIPELINES
    for pipeline in pipelines:
        if pipeline.key is key:
            return pipeline
    raise RegistryError(f"{key} is not in kdit.pipelines.defs.{entry.name}; it has {[p.key.name for p in pipelines]}")


def pipeline_of(checkpoint: Checkpoint) -> FamilyPipeline:
    """The pipeline that runs ``checkpoint``. Raises CheckpointError if there is none."""
    keys = checkpoint.pipeline_keys()
    for key in keys:
        found = family_pipeline(key)
        if found.accepts(checkpoint):
            return found
    raise CheckpointError(
        f"{checkpoint.path / INDEX_FILE}: a {checkpoint.pipeline_class} with these components is none of "
        f"{', '.join(key.value for key in keys)}"
    )
