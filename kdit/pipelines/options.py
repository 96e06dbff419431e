"""Refuses, before any weight is loaded, every option that the chosen family does not declare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

from kdit.config import CacheConfig, ExecuteConfig, ParallelConfig
from kdit.errors import UnsupportedOptionError
from kdit.generators.capabilities import Capabilities
from kdit.generators.registry import generator_def, generator_keys
from kdit.keys import ModelKey, family_of_model


def check_execute_config(key: ModelKey, config: ExecuteConfig) -> None:
    """Raises UnsupportedOptionError naming the option, the family and the families that have it."""
    for name in dict.fromkeys((config.dtype, *config.component_dtypes.values())):
        _require(key, f"dtype {name}", lambda c: c.dtypes, name)
    if config.compile:
        _require(key, "compile", lambda c: c.compile)
    if config.offload:
        _require(key, "offload", lambda c: c.offload)
    if config.quant_config.sage_attn_type is not None:
        _require(key, "quant_config.sage_attn_type", lambda c: c.quantised_attention)
    for item in fields(config.fuse_kernel_config):
        if getattr(config.fuse_kernel_config, item.name):
            _require(key, f"fuse_kernel_config.{item.name}", lambda c: c.fusions, item.name)
    check_cache_config(key, config.cache_config)


def check_cache_config(key: ModelKey, caches: Sequence[CacheConfig] | None) -> None:
    """The same for step caches."""
    for cache in caches or ():
        _require(key, f"cache {type(cache).__name__}", lambda c: c.caches, type(cache))


def check_parallel_config(key: ModelKey, config: ParallelConfig) -> None:
    """The same for parallel axes."""
    for item in fields(config):
        if getattr(config, item.name) > 1:
            _require(key, f"parallel axis {item.name}", lambda c: c.parallel_axes, item.name)


def _require(
    key: ModelKey, option: str, declared: Callable[[Capabilities], bool | tuple[object, ...]], wanted: object = True
) -> None:
    """``declared`` picks the field: a flag, or the names among which ``wanted`` must be."""

    def has(model_key: ModelKey) -> bool:
        field = declared(generator_def(model_key).capabilities)
        return wanted in field if isinstance(field, tuple) else field

    if has(key):
        return
    others = {family_of_model(other).title for other in generator_keys() if has(other)}
    raise UnsupportedOptionError(
        f"{option} is not supported by {family_of_model(key).title}; "
        f"families that have it: {', '.join(sorted(others)) or 'none yet'}"
    )
