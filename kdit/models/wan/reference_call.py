"""Wan in the terms of the reference: inputs that diffusers' WanTransformer3DModel received, as a NetworkCall."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kdit.errors import InputError
from kdit.models.reference_call import NetworkCall
from kdit.models.wan.config import WanParams


def from_reference(inputs: Mapping[str, Tensor], config: Mapping[str, object]) -> NetworkCall:
    """Splits the latents [R, in_channels, F, H, W] into what is denoised and what is given, and gathers the times.

    Raises InputError if the tokens of one latent frame stand at different times.
    """
    params = WanParams.from_config(config)
    latents, given = inputs["hidden_states"].tensor_split([params.out_channels], dim=1)
    cond = {"txt": inputs["encoder_hidden_states"]}
    if given.shape[1]:
        cond["frames"] = given
    if "encoder_hidden_states_image" in inputs:
        image = inputs["encoder_hidden_states_image"]  # first and last frame may come as two entries of the batch
        cond["image"] = image.reshape(latents.shape[0], -1, image.shape[-1])
    times = inputs["timestep"]
    if times.dim() == 2:
        times = _distinct_times(times, latents.shape[2] // params.patch_size[0])
    return NetworkCall(latents, times, cond, tuple(latents.shape[1:]))


def _distinct_times(times: Tensor, num_frames: int) -> Tensor:
    """One time per token [R, L] to [R, k]: one for each of the first k - 1 frames, then that of all others."""
    by_frame = torch.unflatten(times, 1, (num_frames, -1))
    frames = by_frame[:, :, 0]
    if not bool((by_frame == frames[:, :, None]).all()):
        raise InputError("timestep: tokens of one latent frame have different times, expected one time per frame")
    count = num_frames
    while count > 1 and bool((frames[:, count - 2] == frames[:, -1]).all()):
        count -= 1
    return frames[:, :count]
