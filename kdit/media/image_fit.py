"""Brings a picture to a size under a stated rule, with Pillow's Lanczos filter, as diffusers does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from PIL.Image import Image

Fit = Literal["reject", "pad", "crop"]


def fit_image(image: Tensor, size: tuple[int, int], fit: Fit) -> Tensor:
    """Picture [H, W, 3] or mask [H, W, 1] in [0, 1] -> the same with ``size`` (width, height), 8 bits a value.

    "reject" (whose callers refuse what must not be stretched) scales both sides to the size whatever the shape, as
    diffusers does. "pad" scales the whole picture to lie inside the size, in the middle, and continues its edges
    outwards. "crop" scales it to cover the size and cuts what is too much, half on each side.
    """
    picture = to_pillow(image)
    width, height = size
    if fit == "crop":
        return from_pillow(_scaled(picture, size, _covering_box(picture.size, size)))
    if fit == "reject":
        return from_pillow(_scaled(picture, size))
    scale = min(width / picture.width, height / picture.height)
    inside = max(1, min(width, round(picture.width * scale))), max(1, min(height, round(picture.height * scale)))
    left, top = (width - inside[0]) // 2, (height - inside[1]) // 2
    margins = (left, width - inside[0] - left, top, height - inside[1] - top)
    channels_first = from_pillow(_scaled(picture, inside)).permute(2, 0, 1)[None]
    return functional.pad(channels_first, margins, mode="replicate")[0].permute(1, 2, 0).contiguous()


def to_pillow(image: Tensor) -> Image:
    """[H, W, 3] or [H, W, 1] in [0, 1] -> an RGB or grey Pillow image."""
    from PIL import Image

    assert image.ndim == 3 and image.shape[-1] in (1, 3), tuple(image.shape)
    levels = (image.cpu().clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray((levels if image.shape[-1] == 3 else levels[..., 0]).contiguous().numpy())


def from_pillow(picture: Image) -> Tensor:
    """An RGB or grey Pillow image -> [H, W, 3] or [H, W, 1], float32 in [0, 1]."""
    levels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return levels.view(picture.height, picture.width, -1).to(torch.float32) / 255


def _scaled(picture: Image, size: tuple[int, int], box: tuple[float, float, float, float] | None = None) -> Image:
    from PIL import Image

    return picture.resize(size, resample=Image.Resampling.LANCZOS, box=box)


def _covering_box(own: tuple[int, int], size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The largest part of a picture, in its middle, with the shape of ``size``: left, top, right, bottom."""
    scale = max(size[0] / own[0], size[1] / own[1])
    width, height = min(own[0], size[0] / scale), min(own[1], size[1] / scale)
    left, top = (own[0] - width) / 2, (own[1] - height) / 2
    return left, top, left + width, top + height
