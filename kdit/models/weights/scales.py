"""with_scales: joins fp8 weights with the scales that lie beside them in the files. The file readers call it."""

from __future__ import annotations

import json
import math
from typing import NamedTuple

from kdit.errors import CheckpointError
from kdit.models.weights.header import TensorInfo
from kdit.models.weights.recipe import Scaled

WEIGHT_SCALES = ("scale_weight", "weight_scale")  # of the weight beside it: W = stored * scale
INPUT_SCALES = ("scale_input", "input_scale")  # of activations, for products in fp8; kdit multiplies in its own dtype
MARKER = "scaled_fp8"  # an empty tensor that says "the scales count"
FORMAT = "comfy_quant"  # JSON beside a weight that names how it is stored
FP8_FORMATS = ("float8_e4m3fn", "float8_e5m2")  # those of which a scale tells all
SCALE_DTYPES = ("F64", "F32", "F16", "BF16")
_FORMAT_BYTES = 4096  # of JSON: more than any format needs
SCALED_DTYPES = ("F8_E4M3", "F8_E5M2", *SCALE_DTYPES)


class ScaledTensors(NamedTuple):
    """The tensors without scale keys, and what is wrong with those."""

    tensors: dict[str, TensorInfo]
    faults: list[CheckpointError]


def with_scales(stored: dict[str, TensorInfo]) -> ScaledTensors:
    """Give each weight that has a scale the recipe to apply it.

    A scale has one element, none (it counts as 1), or one per row of its weight. A scale without a weight
    is a fault: the file would load and give noise.
    """
    tensors = dict(stored)
    faults: list[CheckpointError] = []
    for name, info in stored.items():
        module, _, leaf = name.rpartition(".")
        if leaf == MARKER:
            del tensors[name]
        elif leaf == FORMAT:
            del tensors[name]
            if (stated := _stated_format(info)) not in FP8_FORMATS:
                known = ", ".join(FP8_FORMATS)
                faults.append(CheckpointError(f"{info.path}: {name} states the format {stated!r}; kdit reads {known}"))
        elif leaf in WEIGHT_SCALES or leaf in INPUT_SCALES:
            del tensors[name]
            weight = tensors.get(f"{module}.weight")
            if weight is None:
                faults.append(CheckpointError(f"{info.path}: {name} is the scale of no tensor: no {module}.weight"))
            elif leaf in WEIGHT_SCALES and (fault := _scale_fault(weight, info)):
                faults.append(fault)
            elif leaf in WEIGHT_SCALES and info.num_elements:
                tensors[weight.name] = weight._replace(recipe=Scaled(weight, info))
    return ScaledTensors(tensors, faults)


def _stated_format(info: TensorInfo) -> object:
    """What the tensor says, or its text if that is no such JSON."""
    with info.path.open("rb") as file:
        file.seek(info.start)
        raw = file.read(min(info.num_bytes, _FORMAT_BYTES))
    try:
        stated: object = json.loads(raw)
    except ValueError:
        return raw
    return stated.get("format") if isinstance(stated, dict) else stated


def _scale_fault(weight: TensorInfo, scale: TensorInfo) -> CheckpointError | None:
    if weight.recipe is not None:
        return CheckpointError(f"{scale.path}: {weight.name} has two scales, {scale.name} is the second")
    if weight.dtype not in SCALED_DTYPES or scale.dtype not in SCALE_DTYPES:
        return CheckpointError(
            f"{scale.path}: {scale.name} ({scale.dtype}) scales {weight.name} ({weight.dtype}), expected a scale in"
            f" {', '.join(SCALE_DTYPES)} of a weight in {', '.join(SCALED_DTYPES)}"
        )
    per_row = bool(weight.shape) and scale.shape and scale.shape[0] == math.prod(scale.shape) == weight.shape[0]
    if scale.num_elements > 1 and not per_row:
        return CheckpointError(
            f"{scale.path}: {scale.name} has the shape {list(scale.shape)}, expected one number or one per row of"
            f" {weight.name} {list(weight.shape)}"
        )
    return None
