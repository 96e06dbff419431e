"""Reads a recorded call of diffusers' FLUX.1 transformer into the network's own terms."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kdit.models.reference_call import NetworkCall


def from_reference(inputs: Mapping[str, Tensor], config: Mapping[str, object]) -> NetworkCall:
    """``inputs``: the keyword arguments that the reference's transformer received."""
    latents, ids = inputs["hidden_states"], inputs["img_ids"]
    cond = {"txt": inputs["encoder_hidden_states"], "pooled": inputs["pooled_projections"]}
    if "guidance" in inputs:
        cond["guidance"] = inputs["guidance"]
    height, width = (int(n) + 1 for n in ids[:, 1:].amax(0))
    return NetworkCall(latents, inputs["timestep"], cond, (latents.shape[-1] // 4, 2 * height, 2 * width))
