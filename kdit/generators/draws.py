"""Random draws of a sample: one CPU generator per sample, in the order in which the reference draws from it.

The GENERATE node and the encoding nodes each make the generator anew, so none needs to hand its state on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sample_generator(seed: int, shape: Sequence[int], earlier: Sequence[torch.dtype]) -> torch.Generator:
    """The generator of the sample with ``seed`` after ``earlier`` draws of ``shape`` (batch of 1 included)."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for dtype in earlier:
        torch.randn(tuple(shape), generator=generator, dtype=dtype)
    return generator
