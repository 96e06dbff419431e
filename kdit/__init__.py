"""kdit: an inference engine for Diffusion Transformers.

Every name below is imported when it is first used, so that ``import kdit`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kdit.collector import collector_paused
from kdit.version import __version__

if TYPE_CHECKING:
    from kdit.config import (
        CacheConfig,
        ExecuteConfig,
        FileOptions,
        FirstBlockCacheConfig,
        FuseKernelConfig,
        HybridCacheConfig,
        ParallelConfig,
        QuantizeConfig,
        RuntimeConfig,
        SampleConfig,
        TeaCacheConfig,
    )
    from kdit.errors import (
        Cancelled,
        CheckpointError,
        CheckpointMissingError,
        ConfigError,
        GraphError,
        InputError,
        KditError,
        NonFiniteError,
        OutputError,
        PinError,
        PinTypeError,
        RegistryError,
        UnsupportedOptionError,
    )
    from kdit.keys import ModelKey, PipelineKey, TensorKey
    from kdit.nodes.core.step_report import StepReport
    from kdit.pipelines.cancel_token import CancelToken
    from kdit.pipelines.extra_inputs import ExtraInputs
    from kdit.pipelines.pipeline import Pipeline
    from kdit.pipelines.pipeline_run import PipelineRun
    from kdit.pipelines.result import GenerateResult

__all__ = [
    "CacheConfig",
    "CancelToken",
    "Cancelled",
    "CheckpointError",
    "CheckpointMissingError",
    "ConfigError",
    "ExecuteConfig",
    "ExtraInputs",
    "FileOptions",
    "FirstBlockCacheConfig",
    "FuseKernelConfig",
    "GenerateResult",
    "GraphError",
    "HybridCacheConfig",
    "InputError",
    "KditError",
    "ModelKey",
    "NonFiniteError",
    "OutputError",
    "ParallelConfig",
    "PinError",
    "PinTypeError",
    "Pipeline",
    "PipelineKey",
    "PipelineRun",
    "QuantizeConfig",
    "RegistryError",
    "RuntimeConfig",
    "SampleConfig",
    "StepReport",
    "TeaCacheConfig",
    "TensorKey",
    "UnsupportedOptionError",
    "__version__",
]

_HOMES = {
    "kdit.nodes.core.step_report": ("StepReport",),
    "kdit.pipelines.cancel_token": ("CancelToken",),
    "kdit.pipelines.extra_inputs": ("ExtraInputs",),
    "kdit.pipelines.pipeline": ("Pipeline",),
    "kdit.pipelines.pipeline_run": ("PipelineRun",),
    "kdit.pipelines.result": ("GenerateResult",),
    "kdit.keys": ("ModelKey", "PipelineKey", "TensorKey"),
    "kdit.errors": (
        "Cancelled",
        "CheckpointError",
        "CheckpointMissingError",
        "ConfigError",
        "GraphError",
        "InputError",
        "KditError",
        "NonFiniteError",
        "OutputError",
        "PinError",
        "PinTypeError",
        "RegistryError",
        "UnsupportedOptionError",
    ),
    "kdit.config": (
        "CacheConfig",
        "ExecuteConfig",
        "FileOptions",
        "FirstBlockCacheConfig",
        "FuseKernelConfig",
        "HybridCacheConfig",
        "ParallelConfig",
        "QuantizeConfig",
        "RuntimeConfig",
        "SampleConfig",
        "TeaCacheConfig",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # a type checker would take any name at all for an export

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'kdit' has no attribute {name!r}")
        with collector_paused():
            value = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted(__all__)
