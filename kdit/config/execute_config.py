"""ExecuteConfig: how a loaded model computes. Fixed for the life of a Pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from kdit.config.cache_config import CacheConfig
from kdit.config.checks import all_are
from kdit.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
Modulation = Literal["table", "inline"]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeConfig:
    """Quantised attention: None, "auto" (by capability) or "default" (the library's own choice)."""

    sage_attn_type: Literal["auto", "default"] | None = None

    def __post_init__(self) -> None:
        if self.sage_attn_type not in (None, "auto", "default"):
            raise ConfigError(f'sage_attn_type must be None, "auto" or "default", got {self.sage_attn_type!r}')


@dataclass(frozen=True, kw_only=True, slots=True)
class FuseKernelConfig:
    """Fused kernels, each compared against the plain path."""

    fuse_apply_rotary_emb: bool = False
    fuse_silu_linear_chunk: bool = False
    fuse_layer_norm_mul_add: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecuteConfig:
    """How a pipeline computes.

    ``modulation``: "table" computes the modulation vectors of all steps before the loop, "inline"
    computes them at each step (less memory between the steps, more work in them).
    ``batch_invariant``: every row (sample and guidance branch) is computed by itself, so that a result is
    bit-equal whatever it is batched with. Batches then cost as much as their members alone.
    """

    dtype: str = "float32"
    component_dtypes: Mapping[str, str] = field(default_factory=dict)  # checkpoint sub-folder -> dtype
    variant: str | None = None  # set of weight files, such as "fp16", of the components that have it
    device: str | None = None  # None: cuda if there is one, else cpu
    modulation: Modulation = "table"
    batch_invariant: bool = False
    compile: bool = False
    attention: Literal["sdpa"] = "sdpa"
    quant_config: QuantizeConfig = QuantizeConfig()
    fuse_kernel_config: FuseKernelConfig = FuseKernelConfig()
    offload: bool = False
    cache_config: tuple[CacheConfig, ...] | None = None  # default of ``generate(cache_config=...)``

    def __post_init__(self) -> None:
        for name, kind in (
            ("component_dtypes", Mapping),
            ("batch_invariant", bool),
            ("compile", bool),
            ("offload", bool),
            ("quant_config", QuantizeConfig),
            ("fuse_kernel_config", FuseKernelConfig),
        ):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"`ExecuteConfig.{name}` must be a {kind.__name__}, got {getattr(self, name)!r}")
        variant: object = self.variant
        if variant is not None and (not isinstance(variant, str) or not variant):
            raise ConfigError(f"`ExecuteConfig.variant` must be the name of a set of files, got {self.variant!r}")
        if self.cache_config is not None and not all_are(self.cache_config, CacheConfig):
            raise ConfigError(f"ExecuteConfig.cache_config must be a tuple of CacheConfig, got {self.cache_config!r}")
        for where, name in (("dtype", self.dtype), *self.component_dtypes.items()):
            if name not in DTYPES:
                raise ConfigError(f"ExecuteConfig {where}: dtype must be one of {', '.join(DTYPES)}, got {name!r}")
        if self.modulation not in get_args(Modulation):
            raise ConfigError(f'`ExecuteConfig.modulation` must be "table" or "inline", got {self.modulation!r}')
        if self.attention != "sdpa":
            raise ConfigError(f'ExecuteConfig.attention must be "sdpa", got {self.attention!r}')
