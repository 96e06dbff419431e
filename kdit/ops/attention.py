"""attention: the one attention call of all networks. Masks and back ends live behind it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kdit.ops.opset import OpSet


class SeqLayout(NamedTuple):
    """Lengths per row before padding; text comes first, then image tokens, each padded at its end.

    ``padded`` is the length of the joint sequence as the tensors hold it, ``txt_padded`` that of its text; None: what
    the longest image part leaves.
    """

    img: tuple[int, ...]
    txt: tuple[int, ...]
    padded: int
    txt_padded: int | None = None

    def is_full(self) -> bool:
        """Whether no row has padding that must be masked."""
        return all(i + t == self.padded for i, t in zip(self.img, self.txt, strict=True))


class Role(Enum):
    """What attends to what; decides the mask and, with several ranks, what is exchanged."""

    JOINT = "joint"  # text and image tokens to each other
    SELF = "self"  # image tokens to image tokens
    CROSS = "cross"  # image tokens to text tokens


def attention(q: Tensor, k: Tensor, v: Tensor, *, layout: SeqLayout, role: Role, ops: OpSet) -> Tensor:
    """Scaled dot-product attention, softmax(q k^T / sqrt(K)) v.

    q [R, H, Lq, K], k and v [R, H, Lk, K] -> [R, Lq, H*K]. Keys beyond a row's length in ``layout`` are
    masked out. ``ops`` chooses the back end.
    """
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=_key_mask(layout, role, k))
    return out.transpose(1, 2).flatten(2)


def _key_mask(layout: SeqLayout, role: Role, k: Tensor) -> Tensor | None:
    """Boolean mask [R, 1, 1, Lk] of the keys that count, or None if all do."""
    if layout.is_full():
        return None
    # The image part starts here. Of rows that were taken out of a batch, none may be as long as what pads them.
    txt_pad = layout.padded - max(layout.img) if layout.txt_padded is None else layout.txt_padded
    position = torch.arange(k.shape[2], device=k.device)
    txt = torch.tensor(layout.txt, device=k.device)[:, None]
    img = torch.tensor(layout.img, device=k.device)[:, None]
    if role is Role.CROSS:
        valid = position < txt
    elif role is Role.SELF:
        valid = position < img
    else:
        valid = (position < txt) | ((position >= txt_pad) & (position < txt_pad + img))
    return valid[:, None, None, :]
