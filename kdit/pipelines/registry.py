"""Finds the FamilyPipeline of a key by importing its family's module when it is first asked for."""

from __future__ import annotations

from importlib import import_module

from kdit.errors import RegistryError
from kdit.keys import PipelineKey, family_of_pipeline
from kdit.pipelines.family_pipeline import FamilyPipeline


def family_pipeline(key: PipelineKey) -> FamilyPipeline:
    """``kdit.pipelines.defs.<family>`` lists its pipelines in ``PIPELINES``."""
    entry = family_of_pipeline(key)
    pipelines: tuple[FamilyPipeline, ...] = import_module(f"kdit.pipelines.defs.{entry.name}").PIPELINES
    for pipeline in pipelines:
        if pipeline.key is key:
            return pipeline
    raise RegistryError(f"{key} is not in kdit.pipelines.defs.{entry.name}; it has {[p.key.name for p in pipelines]}")
