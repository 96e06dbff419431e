"""Capabilities: what a family declares to support. Anything else that is asked for is refused."""

from __future__ import annotations

from dataclasses import dataclass

from kdit.config import CacheConfig
from kdit.keys import TensorKey


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Empty or False means "refused before loading"."""

    inputs: tuple[TensorKey, ...] = (TensorKey.POSITIVE, TensorKey.NEGATIVE, TensorKey.BASE_LATENT, TensorKey.NOISE)
    embedded_guidance: bool = False
    caches: tuple[type[CacheConfig], ...] = ()
    parallel_axes: tuple[str, ...] = ()
    fusions: tuple[str, ...] = ()
    quantised_attention: bool = False
    compile: bool = False
    offload: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
