"""checkpoint_faults: what a pipeline finds wrong with a folder before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from kdit.config import ExecuteConfig
from kdit.errors import CheckpointError, ConfigError
from kdit.generators.scheduler import make_scheduler
from kdit.keys import ModelKind
from kdit.models.checkpoint import Checkpoint
from kdit.models.weights.loading import check_network
from kdit.pipelines.family_pipeline import FamilyPipeline


def checkpoint_faults(checkpoint: Checkpoint, family: FamilyPipeline) -> list[CheckpointError]:
    """Faults of files first, then components that the pipeline needs and the folder lacks, then their settings."""
    held = checkpoint.components
    used = [c for c in family.components.values() if not c.optional or c.folder in held]
    needed = [name for c in used for name in (c.folder, c.tokenizer) if name is not None]
    faults = list(checkpoint.faults())
    if checkpoint.missing is not None:  # which names them all
        return faults
    for name in needed:
        if name not in checkpoint.components:
            faults += _fault_of(partial(checkpoint.component, name))
    faults += _fault_of(lambda: make_scheduler(checkpoint.scheduler_config()))
    if faults:  # what follows reads files that must be sound for that
        return faults
    folders = [c.folder for key, c in family.components.items() if key.kind is ModelKind.NETWORK and c in used]
    networks = [fault for name in folders for fault in _fault_of(partial(check_network, checkpoint.component(name)))]
    return [*networks, *_fault_of(partial(family.defaults, checkpoint))]


def _fault_of(check: Callable[[], object]) -> Iterator[CheckpointError]:
    try:
        check()
    except CheckpointError as fault:
        yield fault


def check_component_names(execute_config: ExecuteConfig, checkpoint: Checkpoint) -> None:
    """Raise ConfigError for a dtype of a component that ``checkpoint`` lacks."""
    unknown = [name for name in execute_config.component_dtypes if name not in checkpoint.components]
    if unknown:
        raise ConfigError(
            f"ExecuteConfig.component_dtypes names {', '.join(map(repr, unknown))}; "
            f"{checkpoint.path} has {', '.join(checkpoint.components)}"
        )
