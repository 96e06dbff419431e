"""Makes the noise scheduler of a request from the checkpoint's scheduler_config.json, and steps it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kdit.errors import CheckpointError
from kdit.generators.denoise_state import Scheduler

CONFIG = "scheduler/scheduler_config.json"
# What the classes raise for settings that they cannot use.
SETTINGS_ERRORS = (ArithmeticError, AttributeError, ImportError, LookupError, TypeError, ValueError)


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
    except SETTINGS_ERRORS as error:
        raise CheckpointError(f"{CONFIG}: {name} cannot be made from these settings: {error}") from error
    predicts = scheduler.config.get("prediction_type", "flow_prediction")
    if predicts != "flow_prediction":
        raise CheckpointError(f"{CONFIG}: prediction_type of {name} is {predicts!r}, expected 'flow_prediction'")
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
