import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from kdit.config import ExecuteConfig, FirstBlockCacheConfig, RuntimeConfig, SampleConfig
from kdit.errors import ConfigError
from kdit.nodes.core.device_info import DeviceInfo
from kdit.nodes.core.metadata import read_metadata
from kdit.nodes.core.node_context import NodeContext

CPU = torch.device("cpu")


def test_pickles_whole() -> None:
    context = NodeContext(
        prompt=["a", "b"],
        negative_prompt="c",
        img_path=[["x.png"]],
        sample_config=SampleConfig(steps=3),
        runtime_config=RuntimeConfig(seed=(1, 2), size=(16, 32)),
        execute_config=ExecuteConfig(component_dtypes={"vae": "float32"}),
        cache_config=(FirstBlockCacheConfig(),),
        metadata={"path": "somewhere", "nested": {"n": 1}},
        device=DeviceInfo(CPU, CPU, rank_id=1, world_size=2),
    )
    assert pickle.loads(pickle.dumps(context)) == context


def test_everything_is_optional_and_metadata_is_not_shared() -> None:
    first, second = NodeContext(), NodeContext()
    first.metadata["a"] = 1
    assert second.metadata == {}
    assert second.device is None


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"inner": x}, lambda x: [1, x], lambda x: (x,)])
def test_tensors_in_metadata_are_refused_by_name(wrap: Callable[[object], object]) -> None:
    with pytest.raises(ConfigError, match=r"metadata\['pixels'\] holds a tensor"):
        NodeContext(metadata={"fine": 1, "pixels": wrap(torch.ones(1))})


def test_a_copy_is_checked_too() -> None:
    context = NodeContext()
    context.metadata["late"] = torch.ones(1)
    with pytest.raises(ConfigError, match="late"):
        replace(context, device=DeviceInfo(CPU, CPU, 0, 1))


@dataclass(frozen=True)
class Settings:
    path: str
    count: int = 2


def test_metadata_is_read_into_a_dataclass() -> None:
    assert read_metadata(Settings, NodeContext(metadata={"path": "p"})) == Settings("p", 2)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"path": "p", "cuont": 3}, "unknown metadata 'cuont'; the node reads path, count"),
        ({}, "missing metadata 'path'"),
    ],
)
def test_misspelt_and_missing_metadata_is_named(metadata: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_metadata(Settings, NodeContext(metadata=metadata))
