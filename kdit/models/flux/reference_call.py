"""Reads a recorded call of diffusers' FLUX.1 transformer into the network's own terms."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kdit.errors import InputError
from kdit.models.reference_call import NetworkCall


def from_reference(inputs: Mapping[str, Tensor], config: Mapping[str, object]) -> NetworkCall:
    """``inputs``: the keyword arguments that the reference's transformer received.

    Raises InputError where tokens of a reference picture follow the latents, as FLUX.1 Kontext's do.
    """
    latents, ids = inputs["hidden_states"], inputs["img_ids"]
    cond = {"txt": inputs["encoder_hidden_states"], "pooled": inputs["pooled_projections"]}
    if "guidance" in inputs:
        cond["guidance"] = inputs["guidance"]
    height, width = (int(n) + 1 for n in ids[:, 1:].amax(0))
    if latents.shape[1] != height * width or bool(ids[:, 0].any()):
        raise InputError(
            f"reference tokens are not supported yet: got {latents.shape[1]} latent tokens, expected one for each "
            f"position of the {height}x{width} grid in img_ids, and 0 on its first axis"
        )
    # Nothing reads the channels; where conditioning is appended to the latents' they are not those of the VAE.
    return NetworkCall(latents, inputs["timestep"], cond, (latents.shape[-1] // 4, 2 * height, 2 * width))
