"""Half precision on CPUs that have no instructions for it: products are computed in float32 and rounded once.

Used by ``linear`` for the networks of ours, and by LOAD_MODEL for the models of libraries.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_QUESTIONS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
WIDENED_ROWS = 2048  # of a weight at a time: large enough for the product's speed, small enough for the cache


def needs_widening(x: Tensor) -> bool:
    """Whether torch would multiply ``x`` 5 to 10 times slower than the same numbers in float32."""
    return x.device.type == "cpu" and x.dtype in _QUESTIONS and _is_slow(x.dtype)


@cache
def _is_slow(dtype: torch.dtype) -> bool:
    """Whether this CPU has no matrix instructions for ``dtype``; False where torch cannot tell."""
    question = getattr(torch.ops.mkldnn, _QUESTIONS[dtype], None) if torch.backends.mkldnn.is_available() else None
    return question is not None and not question()


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight^T + bias, accumulated in float32 and rounded once, as matrix instructions for half precision do it.

    The weight is widened a slice at a time, so that no copy of the whole of it is made.
    """
    wide, num_out = x.float(), weight.shape[0]
    if num_out <= WIDENED_ROWS:
        return F.linear(wide, weight.float(), _wide(bias)).to(x.dtype)
    out = x.new_empty((*x.shape[:-1], num_out))
    for start in range(0, num_out, WIDENED_ROWS):
        part = slice(start, start + WIDENED_ROWS)
        out[..., part] = F.linear(wide, weight[part].float(), None if bias is None else bias[part].float())
    return out


def widen_products(model: nn.Module) -> None:
    """Make the linear layers and convolutions of a library's model compute in that way where this device needs it."""
    kinds: tuple[tuple[type[nn.Module], type[nn.Module]], ...] = (
        (nn.Linear, _WidenedLinear),
        (nn.modules.conv._ConvNd, _WidenedConvolution),
    )
    module: nn.Module
    for module in model.modules():
        for kind, widened in kinds:
            if isinstance(module, kind) and not isinstance(module, widened):
                # Another class rather than another method of the object, which would keep it alive through itself.
                module.__class__ = _with((widened, type(module)))


@cache
def _with(bases: tuple[type[nn.Module], ...]) -> type[nn.Module]:
    cls = bases[-1]
    return type(cls.__name__, bases, {"__doc__": cls.__doc__, "__module__": cls.__module__})


class _WidenedLinear(nn.Module):
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if needs_widening(x) and self.weight.dtype is x.dtype:
            return widened_linear(x, self.weight, self.bias)
        out: Tensor = super().forward(x)
        return out


class _WidenedConvolution(nn.Module):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        plain = super()._conv_forward  # type: ignore[misc]
        if needs_widening(x) and weight.dtype is x.dtype:
            wide: Tensor = plain(x.float(), weight.float(), _wide(bias)).to(x.dtype)
            return wide
        out: Tensor = plain(x, weight, bias)
        return out


def _wide(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()
