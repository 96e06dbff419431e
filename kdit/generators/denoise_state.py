"""DenoiseState: everything that belongs to one request in the loop, and nothing of it anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kdit.keys import ModelKey, RunId
from kdit.models.network import Network
from kdit.models.rows import Cond, ModTable, Static

GuidanceKind = Literal["none", "cfg"]


class Scheduler(Protocol):
    """The part of a diffusers noise scheduler that the loop uses."""

    timesteps: Tensor

    @property
    def config(self) -> Mapping[str, object]:
        """The settings it was made with, defaults included."""

    set_timesteps: Callable[..., None]  # arguments differ by class: sigmas, mu, num_inference_steps

    def step(
        self,
        model_output: Tensor,
        timestep: Tensor,
        sample: Tensor,
        *,
        return_dict: bool,
        generator: list[torch.Generator] | None = None,
    ) -> tuple[Tensor, ...]:
        """Advance ``sample`` by one step."""


@dataclass(frozen=True)
class Guidance:
    """How the branches of one request are combined."""

    kind: GuidanceKind
    scale: float = 1.0


@dataclass
class Branch:
    """One guidance branch of a request: its rows' conditioning and prepared tensors."""

    name: Literal["positive", "negative"]
    static: Static
    mod: ModTable | None  # None: computed at each step


@dataclass
class DenoiseState:
    """One request between two steps. ``static`` and ``mod`` hold the rows of all branches joined (branch by
    branch); the branches hold views of them.
    """

    run: RunId
    model_key: ModelKey  # whose GeneratorDef steps it
    step_index: int
    latents: Tensor  # [B, ...] packed
    scheduler: Scheduler
    guidance: Guidance
    branches: tuple[Branch, ...]
    rng: tuple[torch.Generator, ...]
    network: Network
    noise_shape: tuple[int, ...]
    model_times: Tensor  # [steps], as the network wants them
    static: Static
    mod: ModTable | None
    cond: Cond | None  # kept only where modulation is computed at each step
    prediction: Tensor | None = None  # [branches, B, ...] of the last step, before guidance

    @property
    def num_steps(self) -> int:
        """Length of the schedule."""
        return len(self.scheduler.timesteps)

    @property
    def steps_left(self) -> int:
        """Steps still to run."""
        return self.num_steps - self.step_index

    @property
    def num_rows(self) -> int:
        """Samples times branches."""
        return self.latents.shape[0] * len(self.branches)

    def batch_key(self) -> Hashable:
        """States with equal keys may share a forward."""
        layout = self.static.layout
        return (
            id(self.network),
            self.noise_shape,
            tuple(self.latents.shape[1:]),
            (layout.img[0], layout.txt[0], layout.padded),
            self.guidance.kind,
            tuple(self.model_times.shape[1:]),
            self.mod is None,
        )
