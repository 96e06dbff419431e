"""Makes the noise scheduler of a request from the checkpoint's scheduler_config.json."""

from __future__ import annotations

from collections.abc import Mapping

from kdit.errors import CheckpointError
from kdit.generators.denoise_state import Scheduler


def make_scheduler(config: Mapping[str, object]) -> Scheduler:
    """A new diffusers scheduler; one per request, because it counts its steps."""
    import diffusers

    name = config.get("_class_name")
    found = getattr(diffusers, str(name), None)
    if found is None or not hasattr(found, "set_timesteps"):
        raise CheckpointError(f"scheduler/scheduler_config.json: _class_name {name!r} is no scheduler of diffusers")
    scheduler: Scheduler = found.from_config(dict(config))
    return scheduler
