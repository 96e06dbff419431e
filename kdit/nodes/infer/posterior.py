"""Noise with which encoding nodes sample an autoencoder's posterior: drawn as the reference draws it, or fed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kdit.errors import InputError
from kdit.generators.draws import sample_generator
from kdit.keys import TensorKey
from kdit.nodes.core.pin_hub import PinHub


def posterior_noise(
    pins: PinHub, seeds: Sequence[int], shape: tuple[int, ...], dtype: torch.dtype, earlier: Sequence[str]
) -> list[Tensor]:
    """One tensor of ``shape`` [1, C, h, w] per seed: what POSTERIOR_NOISE holds, else drawn from each sample's own
    generator after its ``earlier`` draws (names of dtypes). One fed sample serves all.
    """
    fed = pins.get_tensor(TensorKey.POSTERIOR_NOISE)
    if fed is None:
        before = [getattr(torch, name) for name in earlier]
        generators = (sample_generator(seed, shape, before) for seed in seeds)
        return [torch.randn(shape, generator=generator, dtype=dtype) for generator in generators]
    held = tuple(tuple(tensor.shape) for tensor in fed.tensors())
    if len(held) != 1 or held[0][1:] != shape[1:] or held[0][0] not in (1, len(seeds)):
        raise InputError(f"fed POSTERIOR_NOISE has shapes {held}, expected one tensor {(len(seeds), *shape[1:])}")
    (noise,) = fed.tensors()
    return list(noise.expand(len(seeds), *noise.shape[1:]).split(1))
