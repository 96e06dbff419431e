"""Checks of the tensors that a caller feeds into a graph. Called by Pipeline."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kdit.errors import InputError
from kdit.keys import TensorKey
from kdit.models.rows import LatentShape
from kdit.pipelines.family_pipeline import LatentForm
from kdit.pipelines.generate_inputs import PipelineGenerateInputs
from kdit.tensor.tensor_value import TensorData

LATENT_KEYS = (TensorKey.NOISE, TensorKey.BASE_LATENT, TensorKey.LATENTS)


def checked_feeds(feeds: Mapping[TensorKey, TensorData] | None) -> dict[TensorKey, TensorData]:
    """A copy of ``feeds``. Raises InputError for a key, a type or a value that cannot be fed."""
    if feeds is not None and not isinstance(feeds, Mapping):
        raise InputError(f"feeds must be a dict from TensorKey to tensors, got {type(feeds).__name__}")
    fed = dict(feeds or {})
    for key, data in fed.items():
        if not isinstance(key, TensorKey):
            raise InputError(f"feeds: keys are TensorKey members, got {key!r}")
        for tensor in data if isinstance(data, list) else [data]:
            _check_tensor(key, tensor)
    return fed


def _check_tensor(key: TensorKey, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise InputError(f"feeds: {key.name} must be a tensor or a list of tensors, got {type(tensor).__name__}")
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_meta:
        raise InputError(
            f"feeds: {key.name} must hold dense floating-point values, got {tensor.dtype}, {tensor.layout} "
            f"on {tensor.device}"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise InputError(f"feeds: {key.name} holds NaN or infinity")


def spatial_feeds(
    feeds: Mapping[TensorKey, TensorData], inputs: PipelineGenerateInputs, shape: LatentShape, form: LatentForm
) -> dict[TensorKey, TensorData]:
    """The fed tensors, latents brought from their public form to that of the pins. Raises InputError."""
    fed = dict(feeds)
    for key in LATENT_KEYS:
        given = fed.get(key)
        if isinstance(given, list):
            raise InputError(f"feeds: {key.name} must be one tensor, got a list of {len(given)}")
        if given is None:
            continue
        if given.shape[:1] != (inputs.num_samples,):
            held = given.shape[0] if given.ndim else "no"
            raise InputError(f"feeds: {key.name} holds {held} samples, expected {inputs.num_samples}, one per prompt")
        fed[key] = form.from_public(given, shape)
    return fed
