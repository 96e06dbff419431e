"""Joins what SD3's text encoders gave into the network's text and pooled text. Generator and verify call it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def join_clip(encoded: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(states [B, 77, Dl], pooled [B, Pl]) of CLIP-L and of CLIP-G, in this order, joined on the channels."""
    states_l, pooled_l, states_g, pooled_g = encoded
    return torch.cat((states_l, states_g), dim=-1), torch.cat((pooled_l, pooled_g), dim=-1)


def join_text(clip: Tensor, t5: Tensor) -> Tensor:
    """CLIP's tokens [B, Lc, Dc], widened with zeros to T5's [B, Lt, D], and then T5's: [B, Lc + Lt, D]."""
    return torch.cat((F.pad(clip, (0, t5.shape[-1] - clip.shape[-1])), t5), dim=1)
