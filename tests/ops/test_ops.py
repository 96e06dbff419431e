"""Attention masks, rotary tables, linear rows, timestep embedding."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdit.ops import half_precision
from kdit.ops.attention import Role, SeqLayout, attention
from kdit.ops.half_precision import WIDENED_ROWS, widen_products
from kdit.ops.linear import linear
from kdit.ops.mlp import gelu_tanh
from kdit.ops.opset import OpSet
from kdit.ops.rope import apply_rope, rope_table
from kdit.ops.timestep import timestep_embedding

OPS = OpSet()


def qkv(length: int, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, 2, length, 4, generator=g) for _ in range(3))
    return q, k, v


def test_attention_joins_heads() -> None:
    q, k, v = qkv(5)
    out = attention(q, k, v, layout=SeqLayout((3, 3), (2, 2), 5), role=Role.JOINT, ops=OPS)
    expected = F.scaled_dot_product_attention(q, k, v)
    assert out.shape == (2, 5, 8)
    torch.testing.assert_close(out[:, :, 4:], expected[:, 1])


@pytest.mark.parametrize(("role", "valid"), [(Role.JOINT, [0, 1, 3, 4]), (Role.CROSS, [0, 1]), (Role.SELF, [0, 1])])
def test_padding_keys_are_masked(role: Role, valid: list[int]) -> None:
    """Row 1 has 2 of 3 text tokens and 2 of 3 image tokens; its padding must not matter."""
    layout = SeqLayout((3, 2), (3, 2), 6)
    length = 6 if role is Role.JOINT else 3
    q, k, v = qkv(length)
    out = attention(q, k, v, layout=layout, role=role, ops=OPS)
    cut = F.scaled_dot_product_attention(q[1:], k[1:, :, valid], v[1:, :, valid]).transpose(1, 2).flatten(2)
    torch.testing.assert_close(out[1:], cut)
    full = F.scaled_dot_product_attention(q[:1], k[:1], v[:1]).transpose(1, 2).flatten(2)
    torch.testing.assert_close(out[:1], full)


def test_rope_rotates_neighbouring_pairs() -> None:
    ids = torch.tensor([[0.0, 0.0], [2.0, 3.0]])
    table = rope_table(ids, (2, 4))
    assert table.shape == (2, 3)
    x = torch.tensor([[1.0, 0, 1, 0, 1, 0]]).expand(2, 6)
    angles = [2.0, 3.0, 3.0 * 10000**-0.5]
    expected = [f(a) for a in angles for f in (math.cos, math.sin)]
    got = apply_rope(x, table)
    torch.testing.assert_close(got[0], x[0])
    torch.testing.assert_close(got[1], torch.tensor(expected))
    assert apply_rope(x.bfloat16(), table).dtype == torch.bfloat16


def test_timestep_embedding_has_cosines_first() -> None:
    out = timestep_embedding(torch.tensor([0.0, 500.0]), 8)
    assert out[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    expected = [f(500 * 10000 ** (-j / 4)) for f in (math.cos, math.sin) for j in range(4)]
    torch.testing.assert_close(out[1], torch.tensor(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_out", [24, WIDENED_ROWS + 5])
def test_half_precision_products_are_summed_in_float32_and_rounded_once(dtype: torch.dtype, num_out: int) -> None:
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=g).to(dtype) for shape in ((2, 3, 40), (num_out, 40), (num_out,)))
    expected = F.linear(x.double(), weight.double(), bias.double())
    out = linear(x, weight, bias, ops=OpSet())
    assert out.dtype is dtype
    torch.testing.assert_close(out, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("layer", [nn.Linear(6, 5), nn.Conv1d(6, 5, 3), nn.Conv2d(6, 5, 3), nn.Conv3d(6, 5, (1, 3, 3))])
@torch.inference_mode()
def test_library_layers_give_the_same_in_half_precision(layer: nn.Module) -> None:
    g = torch.Generator().manual_seed(0)
    shape = {"Linear": (2, 7, 6), "Conv1d": (2, 6, 8), "Conv2d": (2, 6, 8, 8), "Conv3d": (2, 6, 2, 8, 8)}
    x = torch.randn(shape[type(layer).__name__], generator=g)
    exact = copy.deepcopy(layer)(x)
    plain = copy.deepcopy(layer).to(torch.bfloat16)
    widened = copy.deepcopy(plain)
    widen_products(widened)
    out = widened(x.to(torch.bfloat16))
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, plain(x.to(torch.bfloat16)), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(out.float(), exact, rtol=5e-2, atol=5e-2)
    widened.float()
    assert torch.equal(widened(x), plain.float()(x))  # other dtypes go the library's own way


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_is_torchs_to_the_last_digits(dtype: torch.dtype) -> None:
    x = torch.cat((torch.linspace(-30, 30, 4001), torch.tensor([0.0, -0.0, 1e30, -1e30, 1e-30]))).to(dtype)
    before = x.clone()
    out = gelu_tanh(x)
    assert out.dtype is dtype and torch.equal(x, before)
    exact = F.gelu(x.double(), approximate="tanh")
    torch.testing.assert_close(out.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_half_precision_is_left_to_torch_where_it_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    half_precision._is_slow.cache_clear()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    assert not half_precision.needs_widening(x)
    assert torch.equal(linear(x, x, None, ops=OpSet()), F.linear(x, x))
    half_precision._is_slow.cache_clear()
