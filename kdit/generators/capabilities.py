"""Capabilities: what a family declares to support. Anything else that is asked for is refused."""

from __future__ import annotations

from dataclasses import dataclass

from kdit.config import CacheConfig
from kdit.keys import TensorKey


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Empty or False means "refused before loading". ``kdit.pipelines.options`` names each of them for people."""

    inputs: tuple[TensorKey, ...] = (TensorKey.POSITIVE, TensorKey.NEGATIVE, TensorKey.BASE_LATENT, TensorKey.NOISE)
    embedded_guidance: bool = False
    image_strength: bool = False  # the loop can begin at an image
    skip_layers: bool = False  # skip-layer guidance
    caches: tuple[type[CacheConfig], ...] = ()
    parallel_axes: tuple[str, ...] = ()
    fusions: tuple[str, ...] = ()
    attention: tuple[str, ...] = ("sdpa",)  # back ends
    quantised_attention: bool = False
    compile: bool = False
    offload: bool = False
    modulation: tuple[str, ...] = ("table", "inline")
    batch_invariant: bool = True
    step_batches: bool = True  # requests at different steps in one forward
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
