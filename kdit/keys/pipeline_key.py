"""PipelineKey: the identity of a pipeline graph."""

from enum import Enum


class PipelineKey(Enum):
    """One member per pipeline that a model folder can state."""

    FLUX1_T2I = "flux1-t2i"
