"""SD3 in the terms of the reference: inputs that diffusers' SD3Transformer2DModel received, as a NetworkCall."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kdit.models.reference_call import NetworkCall


def from_reference(inputs: Mapping[str, Tensor], config: Mapping[str, object]) -> NetworkCall:
    """Both sides lay the latents out as [R, C, H, W] and count time from 0 to 1000; ``config`` is not needed."""
    latents = inputs["hidden_states"]
    cond = {"txt": inputs["encoder_hidden_states"], "pooled": inputs["pooled_projections"]}
    return NetworkCall(latents, inputs["timestep"], cond, tuple(latents.shape[1:]))
