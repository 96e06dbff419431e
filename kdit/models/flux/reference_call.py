"""Reads a recorded call of diffusers' FLUX.1 transformer into the network's own terms."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kdit.errors import InputError
from kdit.models.flux.config import FluxParams
from kdit.models.reference_call import NetworkCall


def from_reference(inputs: Mapping[str, Tensor], config: Mapping[str, object]) -> NetworkCall:
    """``inputs``: the keyword arguments that the reference's transformer received.

    Raises InputError if the positions of the image tokens are not those of one grid, references after it.
    """
    hidden, ids = inputs["hidden_states"], inputs["img_ids"]
    cond = {"txt": inputs["encoder_hidden_states"], "pooled": inputs["pooled_projections"]}
    if "guidance" in inputs:
        cond["guidance"] = inputs["guidance"]
    num_img = int((ids[:, 0] == 0).sum())
    height, width = (int(n) + 1 for n in ids[:num_img, 1:].amax(0))
    if hidden.shape[1] != ids.shape[0] or num_img != height * width or bool((ids[:num_img, 0] != 0).any()):
        raise InputError(
            f"got {hidden.shape[1]} tokens and {ids.shape[0]} positions, {num_img} of these with 0 on the first axis; "
            f"expected one for each position of the {height}x{width} grid at first, those of references after them"
        )
    if num_img < hidden.shape[1]:
        cond["ref"] = hidden[:, num_img:]
        cond["ref_ids"] = ids[num_img:].expand(hidden.shape[0], -1, -1)
    num_latent = FluxParams.from_config(config).out_channels
    if num_latent < hidden.shape[-1]:
        cond["channels"] = hidden[..., num_latent:]
    shape = (num_latent // 4, 2 * height, 2 * width)
    latents = hidden[:, :num_img, :num_latent]
    return NetworkCall(latents, inputs["timestep"], cond, shape, num_tokens=num_img)
