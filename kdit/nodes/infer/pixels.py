"""Pixels on the IMAGE and MASK pins to what an image autoencoder reads. Called by the nodes that encode."""

from __future__ import annotations

import torch
from torch import Tensor

from kdit.errors import InputError
from kdit.media.image_fit import Fit, fit_image


def image_list(data: Tensor | list[Tensor], channels: int = 3) -> list[Tensor]:
    """[B, H, W, C] or a list of [n, H, W, C] -> list of single pictures [H, W, C]; masks have one channel."""
    tensors = data if isinstance(data, list) else [data]
    for tensor in tensors:
        if tensor.ndim != 4 or tensor.shape[-1] != channels:
            kind = "an IMAGE" if channels == 3 else "a MASK"
            raise InputError(f"{kind} tensor must be [B, H, W, {channels}], got {tuple(tensor.shape)}")
    return [image for tensor in tensors for image in tensor.unbind(0)]


def check_one_per_sample(images: list[Tensor], num_samples: int, what: str = "images") -> None:
    """One picture serves all samples, or each has its own. Raises InputError."""
    if len(images) not in (1, num_samples):
        raise InputError(f"{len(images)} {what} for {num_samples} samples; give one for all, or one per sample")


def to_vae_pixels(image: Tensor, size: tuple[int, int], fit: Fit = "reject") -> Tensor:
    """image [H, W, 3] in [0, 1] -> [1, 3, H', W'] in [-1, 1] for ``size`` (width, height), as diffusers resizes it
    unless ``fit`` keeps its shape.
    """
    return (2.0 * fit_image(image, size, fit) - 1.0).permute(2, 0, 1)[None]


def to_mask_pixels(mask: Tensor, size: tuple[int, int], fit: Fit = "reject", *, binarize: bool = False) -> Tensor:
    """mask [H, W, 1] in [0, 1] -> [1, 1, H', W'] in [0, 1]; ``binarize`` makes it 0 below one half, else 1."""
    fitted = fit_image(mask, size, fit).permute(2, 0, 1)[None]
    return (fitted >= 0.5).to(torch.float32) if binarize else fitted


def cut_to(pixels: Tensor, size: tuple[int, int] | None) -> Tensor:
    """The middle of pixels [..., H, W, 3] with ``size`` (width, height); None leaves them whole."""
    if size is None:
        return pixels
    width, height = size
    top, left = (pixels.shape[-3] - height) // 2, (pixels.shape[-2] - width) // 2
    return pixels[..., top : top + height, left : left + width, :]
