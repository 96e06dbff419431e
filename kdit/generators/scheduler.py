"""Makes the noise scheduler of a request from the checkpoint's scheduler_config.json, and steps it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kdit.errors import CheckpointError
from kdit.generators.denoise_state import Scheduler

CONFIG = "scheduler/scheduler_config.json"


def make_scheduler(config: Mapping[str, object]) -> Scheduler:
    """A new diffusers scheduler; one per request, because it counts its steps.

    Raises CheckpointError for a class that diffusers does not have, that cannot be given sigmas, or whose
    result would not depend on the request's seed alone.
    """
    import diffusers

    name = config.get("_class_name")
    found = getattr(diffusers, str(name), None)
    if found is None or not hasattr(found, "set_timesteps"):
        raise CheckpointError(f"{CONFIG}: _class_name {name!r} is no scheduler of diffusers")
    accepted = inspect.signature(found.set_timesteps).parameters
    if "sigmas" not in accepted:
        raise CheckpointError(f"{CONFIG}: {name} takes no sigmas, so it cannot sample a flow model")
    try:
        scheduler: Scheduler = found.from_config(dict(config))
    except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:  # whatever a class says of its settings
        raise CheckpointError(f"{CONFIG}: {name} cannot be made from these settings: {error}") from error
    if scheduler.config.get("stochastic_sampling"):
        raise CheckpointError(
            f"{CONFIG}: stochastic_sampling of {name} draws from the process's global generator, so a seed would "
            "not decide the picture; set it to false"
        )
    return scheduler


def scheduler_step(
    scheduler: Scheduler, prediction: Tensor, step_index: int, latents: Tensor, rng: Sequence[torch.Generator]
) -> Tensor:
    """Latents after one step. A sampler that adds noise draws it from the samples' own generators."""
    own_noise = {"generator": list(rng)} if "generator" in inspect.signature(scheduler.step).parameters else {}
    timestep = scheduler.timesteps[step_index]
    (moved, *_) = scheduler.step(prediction, timestep, latents, return_dict=False, **own_noise)
    return moved
