"""PipelineKey: the identity of a pipeline graph."""

from enum import Enum


class PipelineKey(Enum):
    """One member per pipeline that a checkpoint can be run with."""

    FLUX1_T2I = "flux1-t2i"
    FLUX1_FILL = "flux1-fill"
    FLUX1_CONTROL = "flux1-control"
    FLUX1_KONTEXT = "flux1-kontext"
    SD3_T2I = "sd3-t2i"
    WAN2_1_T2V = "wan2.1-t2v"
    WAN2_1_I2V = "wan2.1-i2v"
    WAN2_2_T2V_14B = "wan2.2-t2v-14b"
    WAN2_2_I2V_14B = "wan2.2-i2v-14b"
    WAN2_2_TI2V_5B = "wan2.2-ti2v-5b"
