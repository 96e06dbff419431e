"""StepReport: what one denoising step of one run did. Travels from the node to callbacks and servers."""

from dataclasses import dataclass

from kdit.keys import RunId


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Step ``step_index`` of ``num_steps`` (counted from 0) has been done."""

    run: RunId
    step_index: int
    num_steps: int
    timestep: float  # as the scheduler counts it, 1000 = pure noise
    seconds: float  # wall time of the step; shared by all runs that were stepped together
