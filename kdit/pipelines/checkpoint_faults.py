"""checkpoint_faults: what a pipeline finds wrong with a folder before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from kdit.errors import CheckpointError
from kdit.generators.scheduler import make_scheduler
from kdit.models.checkpoint import Checkpoint
from kdit.models.weights.loading import check_network
from kdit.pipelines.family_pipeline import FamilyPipeline


def checkpoint_faults(checkpoint: Checkpoint, family: FamilyPipeline) -> list[CheckpointError]:
    """Faults of files first, then components that the pipeline needs and the folder lacks, then their settings."""
    needed = [name for c in family.components.values() for name in (c.folder, c.tokenizer) if name is not None]
    faults = list(checkpoint.faults())
    for name in needed:
        if name not in checkpoint.components:
            faults += _fault_of(partial(checkpoint.component, name))
    faults += _fault_of(lambda: make_scheduler(checkpoint.scheduler_config()))
    if faults:  # what follows reads files that must be sound for that
        return faults
    network = checkpoint.component(family.components[family.network].folder)
    return [*_fault_of(partial(check_network, network)), *_fault_of(partial(family.defaults, checkpoint))]


def _fault_of(check: Callable[[], object]) -> Iterator[CheckpointError]:
    try:
        check()
    except CheckpointError as fault:
        yield fault
