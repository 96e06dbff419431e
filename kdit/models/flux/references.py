"""Tokens of FLUX.1 Kontext's reference pictures: packed latents and where they stand beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kdit.models.flux.latents import pack

REFERENCE_AXIS = 1.0  # first coordinate of every reference token; the picture that is made has 0


class ReferenceTokens(NamedTuple):
    """Of several samples, padded at the end with zeros: tokens [B, L, 4 C], ids [B, L, 3]."""

    tokens: Tensor
    ids: Tensor


def reference_tokens(samples: Sequence[Sequence[Tensor]]) -> ReferenceTokens | None:
    """``samples``: for each sample its reference latents [1, C, h, w]; None if no sample has one.

    A single reference has the coordinates of its own grid, from 0. Of several, each further one is laid to the right of
    those before it or below them, whichever makes the shorter sheet, so that no two share a coordinate.
    """
    if not any(samples):
        return None
    rows = [_of_one_sample(own) for own in samples if own]
    empty = ReferenceTokens(rows[0].tokens[:0], rows[0].ids[:0])
    remaining = iter(rows)
    every = [next(remaining) if own else empty for own in samples]
    padded = (torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True) for parts in zip(*every, strict=True))
    return ReferenceTokens(*padded)


def _of_one_sample(latents: Sequence[Tensor]) -> ReferenceTokens:
    """Tokens [L, 4 C] and ids [L, 3]."""
    ids, sheet_height, sheet_width = [], 0, 0
    for picture in latents:
        height, width = picture.shape[-2] // 2, picture.shape[-1] // 2
        right = sheet_height + height > sheet_width + width
        top, left = (0, sheet_width) if right else (sheet_height, 0)
        ids.append(_grid_ids(height, width, top, left).to(picture.device))
        sheet_height, sheet_width = max(sheet_height, top + height), max(sheet_width, left + width)
    return ReferenceTokens(torch.cat([pack(picture)[0] for picture in latents]), torch.cat(ids))


def _grid_ids(height: int, width: int, top: int, left: int) -> Tensor:
    """(1, row, column) of each token, [height * width, 3]."""
    ids = torch.full((height, width, 3), REFERENCE_AXIS)
    ids[..., 1] = torch.arange(top, top + height)[:, None]
    ids[..., 2] = torch.arange(left, left + width)
    return ids.flatten(0, 1)
