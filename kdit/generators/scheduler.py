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


def first_step(num_steps: int, strength: float | None) -> int:
    """The step at which a request begins that changes an image by ``strength``, as the reference counts.

    None and 1: the first step. 0: ``num_steps``, that is none is run. In between at least one is.
    """
    if strength is None:
        return 0
    first = int(max(num_steps - min(num_steps * strength, num_steps), 0))
    return min(first, num_steps - 1) if strength > 0 else num_steps


def begin_at(scheduler: Scheduler, first: int, image: Tensor, noise: Tensor) -> Tensor:
    """Let the scheduler begin at step ``first`` of its schedule; returns ``image`` with that step's share of noise."""
    if first == len(scheduler.timesteps):
        return image
    scheduler.set_begin_index(first)
    timesteps = scheduler.timesteps[first : first + 1].repeat(len(image))
    scale = getattr(scheduler, "scale_noise", None)  # flow schedulers by diffusers' newer name
    if scale is not None:
        noised: Tensor = scale(image, timesteps, noise)
    else:
        noised = scheduler.add_noise(image, noise, timesteps)
    return noised


def scheduler_step(
    scheduler: Scheduler, prediction: Tensor, timestep: Tensor, latents: Tensor, rng: Sequence[torch.Generator]
) -> Tensor:
    """Latents after one step. A sampler that adds noise draws it from the samples' own generators."""
    own_noise = {"generator": list(rng)} if "generator" in inspect.signature(scheduler.step).parameters else {}
    (moved, *_) = scheduler.step(prediction, timestep, latents, return_dict=False, **own_noise)
    return moved
