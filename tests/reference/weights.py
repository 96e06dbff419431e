"""Seeded random weights for every parameter of a module, and the gains that keep activations in range."""

from __future__ import annotations

import math
import re
import zlib

import torch


@torch.no_grad()
def randomise(module: torch.nn.Module, seed: int, gains: dict[str, float] | None = None) -> torch.nn.Module:
    """Give every parameter a seeded random value, whatever the library's own initialisation was.

    * matrices and kernels: N(0, gain / fan_in), so activations keep a spread near 1;
    * embeddings: N(0, 0.25);
    * scales that start at one (norms, gammas): gain * (1 + N(0, 0.04)) — never exactly one;
    * biases: N(0, 0.01) — never zero;
    * every other table, in particular those the library starts at zero (adaLN tables, layer scales,
      register tokens): N(0, 0.09).

    Each parameter has its own generator, seeded from (seed, name), so that adding one leaves the
    others unchanged. ``gains`` maps a regular expression on the name to a gain.
    """
    embeddings = {f"{name}.weight" for name, child in module.named_modules() if isinstance(child, torch.nn.Embedding)}
    for name, parameter in module.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        normal = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        leaf = name.rsplit(".", 1)[-1]
        factor = math.prod(g for pattern, g in (gains or {}).items() if re.search(pattern, name))
        if name in embeddings:
            value = 0.5 * normal
        elif leaf in ("original0", "weight_g"):  # magnitude of a weight-normalised kernel
            value = factor * (1 + 0.2 * normal).abs()
        elif leaf == "bias" or leaf.endswith("_bias"):
            value = 0.1 * normal
        elif parameter.numel() > 1 and bool((parameter == 1).all()):
            value = factor * (1 + 0.2 * normal)
        elif parameter.ndim >= 2 and leaf in ("weight", "original1", "weight_v"):
            fan_in = parameter.numel() // parameter.shape[0]
            value = normal * factor / math.sqrt(fan_in)
        else:
            value = factor * 0.3 * normal
        parameter.copy_(value)
    for name, buffer in module.named_buffers():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        if name.endswith("running_mean"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        elif name.endswith("running_var"):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return module.eval()


# The gain of a decoder's last layer: wide contrast, yet most pixels stay inside the clamp to [0, 1].
VAE_GAINS = {r"decoder\.(conv_out|proj_out)\.": 0.9}
IMAGE_3D_VAE_GAINS = {r"decoder\.conv_out\.": 3.0}
VIDEO_VAE_GAINS = {r"decoder\.conv_out\.": 1.2}
# Sharper attention: where a few text tokens stand among thousands of image tokens, uniform attention
# would hide the prompt.
SHARP_GAINS = {r"norm_(added_)?[qk]\.|_attn_[qk]_norm\.": 1.6}
# Deep stacks of random layers would amplify rounding; the residual branches are turned down.
DEEP_GAINS = {r"\.(o_proj|down_proj)\.": 0.3}
