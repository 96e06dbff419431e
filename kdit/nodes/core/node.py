"""Node and its kinds: the computing units of a graph. Made by the factories, run by the Executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.pin_def import PinDef
from kdit.nodes.core.pin_hub import PinHub
from kdit.nodes.core.step_report import StepReport


class Node(ABC):
    """One unit of work. Stateless: a node may run for many runs, its results go through ``pins`` alone."""

    input_defs: ClassVar[list[PinDef]] = []  # tensors it may read; model pins come from the NodeDef
    output_defs: ClassVar[list[PinDef]] = []  # what it may write

    @abstractmethod
    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """Read the inputs, compute, write the outputs. Writes whatever the rank is."""


class IONode(Node):
    """Loads a model, reads or writes a file, or bridges to the caller."""


class InferNode(Node):
    """Computes."""


class SteppableNode(InferNode):
    """A node whose work is many steps, between which runs may join, leave, or be looked at.

    The Executor keeps the state of each run; a state owns everything that belongs to its run.
    """

    @abstractmethod
    def open(self, pins: PinHub, *, context: NodeContext) -> object:
        """Read all inputs and return the state of the run ``pins.run``; inputs are freed afterwards."""

    @abstractmethod
    def step(self, states: Sequence[object]) -> tuple[StepReport, ...]:
        """One step of every state, together; one report per state, in the same order."""

    @abstractmethod
    def close(self, state: object, pins: PinHub) -> None:
        """Write the outputs of a finished state; of the inputs only models can still be read."""

    @abstractmethod
    def steps_left(self, state: object) -> int:
        """How many steps the state still needs."""

    @abstractmethod
    def peek(self, state: object) -> dict[str, Tensor]:
        """What can be shown of a state between two steps, by name."""

    def run(self, pins: PinHub, *, context: NodeContext) -> None:
        """All steps of one run in one call."""
        state = self.open(pins, context=context)
        while self.steps_left(state):
            self.step((state,))
        self.close(state, pins)
