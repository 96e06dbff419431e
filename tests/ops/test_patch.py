"""Patches against torch's own convolution and pixel shuffle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kdit.ops.opset import OpSet
from kdit.ops.patch import PatchEmbed, patchify, unpatchify


@pytest.mark.parametrize(("patch", "size"), [((2, 2), (4, 6)), ((1, 2, 2), (3, 4, 6)), ((2, 1, 3), (4, 2, 6))])
def test_embedding_is_a_convolution_with_stride(patch: tuple[int, ...], size: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, *size, generator=generator)
    embed = PatchEmbed(5, 7, patch, ops=OpSet()).requires_grad_(False)
    embed.bias.copy_(torch.randn(7, generator=generator))
    convolve = F.conv2d if len(patch) == 2 else F.conv3d
    expected = convolve(x, embed.weight, embed.bias, stride=patch).flatten(2).transpose(1, 2)
    torch.testing.assert_close(embed(patchify(x, patch)), expected)


def test_unpatchify_reads_channels_fastest() -> None:
    tokens = torch.arange(2 * 6 * 4 * 3.0).view(2, 6, 4 * 3)
    expected = F.pixel_shuffle(tokens.unflatten(-1, (4, 3)).transpose(2, 3).flatten(2).mT.unflatten(-1, (2, 3)), 2)
    assert torch.equal(unpatchify(tokens, (2, 2), (4, 6)), expected)


def test_unpatchify_undoes_patchify_up_to_the_order_within_a_token() -> None:
    x = torch.arange(2 * 5 * 4 * 4 * 6.0).view(2, 5, 4, 4, 6)
    tokens = patchify(x, (2, 2, 3)).unflatten(-1, (5, 12)).transpose(2, 3).flatten(2)
    assert torch.equal(unpatchify(tokens, (2, 2, 3), (4, 4, 6)), x)
