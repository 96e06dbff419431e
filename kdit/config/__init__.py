"""Frozen settings of a request, of execution and of parallelism, each checked where it is made."""

from kdit.config.cache_config import CacheConfig, FirstBlockCacheConfig, HybridCacheConfig, TeaCacheConfig
from kdit.config.execute_config import DTYPES, ExecuteConfig, FuseKernelConfig, QuantizeConfig
from kdit.config.file_options import FileOptions
from kdit.config.parallel_config import ParallelConfig
from kdit.config.runtime_config import RuntimeConfig
from kdit.config.sample_config import SampleConfig

__all__ = [
    "DTYPES",
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
]
