"""The options that a network may or may not have, by name; refuses, before any weight is loaded, those it lacks.

Pipeline calls the checks, ``capability_matrix`` lists the options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Literal, NamedTuple, get_args

from kdit.config import (
    DTYPES,
    CacheConfig,
    ExecuteConfig,
    FirstBlockCacheConfig,
    FuseKernelConfig,
    HybridCacheConfig,
    ParallelConfig,
    TeaCacheConfig,
)
from kdit.config.execute_config import Modulation
from kdit.errors import UnsupportedOptionError
from kdit.generators.capabilities import Capabilities
from kdit.generators.registry import generator_def, generator_keys
from kdit.keys import ModelKey, family_of_model

Group = Literal["inputs", "guidance", "numbers", "speed", "caches", "parallel axes"]
CACHES: tuple[type[CacheConfig], ...] = (FirstBlockCacheConfig, TeaCacheConfig, HybridCacheConfig)
ATTENTION = ("sdpa",)


class NetworkOption(NamedTuple):
    """One thing that can be asked of a network. ``name`` is how refusals and the matrix call it."""

    name: str
    group: Group
    has: Callable[[Capabilities], bool]


def _flag(field: str) -> Callable[[Capabilities], bool]:
    return lambda declared: bool(getattr(declared, field))


def _among(field: str, wanted: object) -> Callable[[Capabilities], bool]:
    return lambda declared: wanted in getattr(declared, field)


def _cache_name(kind: type[CacheConfig]) -> str:
    return f"cache {kind.__name__}"


def _network_options() -> tuple[NetworkOption, ...]:
    return (
        NetworkOption("embedded guidance", "guidance", _flag("embedded_guidance")),
        NetworkOption("skip-layer guidance", "guidance", _flag("skip_layers")),
        *(NetworkOption(f"dtype {name}", "numbers", _among("dtypes", name)) for name in DTYPES),
        NetworkOption("batch_invariant", "numbers", _flag("batch_invariant")),
        *(NetworkOption(f"modulation {name}", "speed", _among("modulation", name)) for name in get_args(Modulation)),
        NetworkOption("step batches", "speed", _flag("step_batches")),
        *(NetworkOption(f"attention {name}", "speed", _among("attention", name)) for name in ATTENTION),
        NetworkOption("quant_config.sage_attn_type", "speed", _flag("quantised_attention")),
        NetworkOption("compile", "speed", _flag("compile")),
        NetworkOption("offload", "speed", _flag("offload")),
        *(
            NetworkOption(f"fuse_kernel_config.{item.name}", "speed", _among("fusions", item.name))
            for item in fields(FuseKernelConfig)
        ),
        *(NetworkOption(_cache_name(kind), "caches", _among("caches", kind)) for kind in CACHES),
        *(
            NetworkOption(f"parallel axis {item.name}", "parallel axes", _among("parallel_axes", item.name))
            for item in fields(ParallelConfig)
        ),
    )


NETWORK_OPTIONS: dict[str, NetworkOption] = {option.name: option for option in _network_options()}


def check_execute_config(key: ModelKey, config: ExecuteConfig) -> None:
    """Raises UnsupportedOptionError naming the option, the family and the families that have it."""
    for name in dict.fromkeys((config.dtype, *config.component_dtypes.values())):
        require(key, f"dtype {name}")
    require(key, f"modulation {config.modulation}")
    require(key, f"attention {config.attention}")
    asked = {
        "batch_invariant": config.batch_invariant,
        "compile": config.compile,
        "offload": config.offload,
        "quant_config.sage_attn_type": config.quant_config.sage_attn_type is not None,
    }
    for item in fields(config.fuse_kernel_config):
        asked[f"fuse_kernel_config.{item.name}"] = getattr(config.fuse_kernel_config, item.name)
    for name, is_asked in asked.items():
        if is_asked:
            require(key, name)
    check_cache_config(key, config.cache_config)


def check_cache_config(key: ModelKey, caches: Sequence[CacheConfig] | None) -> None:
    """The same for step caches."""
    for cache in caches or ():
        require(key, _cache_name(type(cache)))


def check_parallel_config(key: ModelKey, config: ParallelConfig) -> None:
    """The same for parallel axes."""
    for item in fields(config):
        if getattr(config, item.name) > 1:
            require(key, f"parallel axis {item.name}")


def require(key: ModelKey, name: str) -> None:
    """Raise UnsupportedOptionError if the network of ``key`` does not have the option ``name``."""
    option = NETWORK_OPTIONS[name]

    def has(model_key: ModelKey) -> bool:
        return option.has(generator_def(model_key).capabilities)

    if has(key):
        return
    others = {family_of_model(other).title for other in generator_keys() if has(other)}
    raise UnsupportedOptionError(
        f"{name} is not supported by {family_of_model(key).title}; "
        f"families that have it: {', '.join(sorted(others)) or 'none yet'}"
    )
