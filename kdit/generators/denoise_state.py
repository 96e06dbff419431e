"""DenoiseState: everything that belongs to one request in the loop, and nothing of it anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kdit.generators.generator_context import SkipLayers
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

    def set_begin_index(self, begin_index: int) -> None:
        """Begin at this step of the schedule."""

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Samples as they are at ``timesteps``."""

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
    skip_layers: SkipLayers | None = None


@dataclass(frozen=True)
class Phase:
    """Consecutive steps that one network runs. Models with experts have several."""

    network: Network
    start: int
    stop: int
    guidance: Guidance


@dataclass
class Branch:
    """One guidance branch of a request: its rows' conditioning and prepared tensors."""

    name: Literal["positive", "negative"]
    static: Static
    mod: ModTable | None  # None: computed at each step


@dataclass(frozen=True)
class Prepared:
    """What the loop needs for one phase. ``static`` and ``mod`` hold the rows of all branches joined (branch by
    branch); the branches hold views of them.
    """

    phase: Phase
    static: Static
    mod: ModTable | None  # of the phase's own steps; None: computed at each step
    branches: tuple[Branch, ...]


@dataclass
class DenoiseState:
    """One request between two steps."""

    run: RunId
    model_key: ModelKey  # whose GeneratorDef steps it
    step_index: int
    latents: Tensor  # [B, ...] packed
    scheduler: Scheduler
    timesteps: Tensor  # [steps], those that this request runs
    model_times: Tensor  # [steps] or [steps, k], as the network wants them
    phases: tuple[Phase, ...]
    rng: tuple[torch.Generator, ...]
    noise_shape: tuple[int, ...]
    num_branches: int
    cond: Cond | None  # rows of all branches; dropped when nothing will be prepared from it any more
    inline: bool  # modulation is computed at each step
    rows_per_forward: int | None
    pinned: Tensor | None  # leading frames that are given
    prepared: Prepared | None = None  # of the phase that runs
    prediction: Tensor | None = None  # [branches, B, ...] of the last step, before guidance

    @property
    def num_steps(self) -> int:
        """Steps that this request runs."""
        return len(self.timesteps)

    @property
    def steps_left(self) -> int:
        """Steps still to run."""
        return self.num_steps - self.step_index

    @property
    def num_samples(self) -> int:
        """B."""
        return self.latents.shape[0]

    @property
    def num_rows(self) -> int:
        """Samples times branches."""
        return self.num_samples * self.num_branches

    @property
    def phase(self) -> Phase:
        """The phase of the next step."""
        return next(phase for phase in self.phases if self.step_index < phase.stop)

    @property
    def guidance(self) -> Guidance:
        """How the branches of the next step are combined."""
        return self.phase.guidance

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The guidance branches as they are prepared."""
        return self.current.branches

    @property
    def current(self) -> Prepared:
        """What is prepared."""
        assert self.prepared is not None, "the state was not prepared for its next step"
        return self.prepared

    def batch_key(self) -> Hashable:
        """States with equal keys may share a forward."""
        return (id(self.phase.network), self.step_key())

    def step_key(self) -> Hashable:
        """States with equal keys may share a step. Those in phases of different networks share no forward in it."""
        layout = self.current.static.layout
        return (
            self.noise_shape,
            tuple(self.latents.shape[1:]),
            (max(layout.img), max(layout.txt), layout.padded),
            self.guidance.kind,
            tuple(self.model_times.shape[1:]),
            self.inline,
        )
