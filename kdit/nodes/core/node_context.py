"""NodeContext: settings, metadata and device of one node call. Made by a ContextBuilder, crosses processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from kdit.config import CacheConfig, ExecuteConfig, RuntimeConfig, SampleConfig
from kdit.errors import ConfigError
from kdit.nodes.core.device_info import DeviceInfo


@dataclass
class NodeContext:
    """Everything a node gets besides its pins. Holds no tensors, so that it can be pickled anywhere.

    ``device`` is None until the Executor hands the node a copy with its own DeviceInfo.
    """

    prompt: str | list[str] | None = None
    negative_prompt: str | list[str] | None = None
    img_path: str | list[str] | list[list[str]] | None = None
    sample_config: SampleConfig | None = None
    runtime_config: RuntimeConfig | None = None
    execute_config: ExecuteConfig | None = None
    cache_config: tuple[CacheConfig, ...] | None = None
    metadata: dict[str, object] = field(default_factory=dict)
    device: DeviceInfo | None = None

    def __post_init__(self) -> None:
        for name, value in self.metadata.items():
            items: tuple[object, ...] = (value,)
            if isinstance(value, dict):
                items = tuple(value.values())
            elif isinstance(value, list | tuple):
                items = tuple(value)
            if any(isinstance(item, Tensor) for item in items):
                raise ConfigError(
                    f"NodeContext.metadata[{name!r}] holds a tensor; tensors travel along edges or are fed"
                )
