"""Pixels on the IMAGE pin to what an image autoencoder reads. Resizing is diffusers' own, through Pillow."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from kdit.errors import InputError


def image_list(data: Tensor | list[Tensor]) -> list[Tensor]:
    """[B, H, W, 3] or a list of [n, H, W, 3] -> list of single images [H, W, 3]."""
    tensors = data if isinstance(data, list) else [data]
    for tensor in tensors:
        if tensor.ndim != 4 or tensor.shape[-1] != 3:
            raise InputError(f"an IMAGE tensor must be [B, H, W, 3], got {tuple(tensor.shape)}")
    return [image for tensor in tensors for image in tensor.unbind(0)]


def to_vae_pixels(image: Tensor, size: tuple[int, int] | None, factor: int) -> Tensor:
    """image [H, W, 3] in [0, 1] -> [1, 3, H', W'] in [-1, 1]; ``size`` is (width, height), None keeps its own."""
    from diffusers.image_processor import VaeImageProcessor
    from PIL import Image

    levels = (image.cpu().clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    width, height = size or (image.shape[1], image.shape[0])
    pixels = VaeImageProcessor(vae_scale_factor=factor).preprocess(Image.fromarray(levels), height=height, width=width)
    return cast(Tensor, pixels)
