"""Engine: hands every command to the executors and owns nothing else. Called by Pipeline, servers and adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from kdit.config import ParallelConfig
from kdit.engine.auto_dispatch import auto_dispatch
from kdit.errors import ConfigError
from kdit.executor.distributed_group import DistributedGroupManager
from kdit.executor.executor import Executor
from kdit.keys import MAIN, RunId, TensorKey
from kdit.models.model_pool import LoadedModel
from kdit.nodes.core.device_info import DeviceInfo
from kdit.tensor.tensor_pool_key import TensorPoolKey
from kdit.tensor.tensor_value import TensorData


class Engine:
    """One or several executors behind the methods of one. Results are those of rank 0."""

    _default: ClassVar[Engine | None] = None

    def __init__(self, executors: Sequence[Executor]) -> None:
        assert executors, "an engine needs an executor"
        self._executors = tuple(executors)

    @classmethod
    def get_default(cls) -> Engine:
        """The engine of this process, made on first use: one executor, on cuda if there is one, else on the cpu."""
        if cls._default is None:
            cls._default = cls.single()
        return cls._default

    @classmethod
    def single(cls, device: str | None = None, parallel_config: ParallelConfig | None = None) -> Engine:
        """A new engine with one executor in this process, by default on cuda if there is one."""
        config = parallel_config or ParallelConfig()
        if config.world_size != 1:
            raise ConfigError(f"ParallelConfig asks for {config.world_size} ranks; this build runs one process")
        info = DeviceInfo(_compute_device(device), torch.device("cpu"), rank_id=0, world_size=1)
        return cls([Executor(info, config, DistributedGroupManager())])

    @property
    def executors(self) -> tuple[Executor, ...]:
        """All executors, in rank order."""
        return self._executors

    run_node = auto_dispatch(Executor.run_node)
    open_generate = auto_dispatch(Executor.open_generate)
    step_generate = auto_dispatch(Executor.step_generate)
    close_generate = auto_dispatch(Executor.close_generate)
    peek_generate = auto_dispatch(Executor.peek_generate)
    steps_left = auto_dispatch(Executor.steps_left)
    end_run = auto_dispatch(Executor.end_run)
    notices = auto_dispatch(Executor.notices)
    release_later = auto_dispatch(Executor.release_later)
    feed_tensors = auto_dispatch(Executor.feed_tensors)
    put_tensors = auto_dispatch(Executor.put_tensors)
    register_tensor = auto_dispatch(Executor.register_tensor)
    consume_tensor = auto_dispatch(Executor.consume_tensor)
    clear_all_tensors = auto_dispatch(Executor.clear_all_tensors)
    forget_nodes = auto_dispatch(Executor.forget_nodes)
    clear_models = auto_dispatch(Executor.clear_models)
    _shutdown_executors = auto_dispatch(Executor.shutdown)

    def get_tensor(self, key: TensorPoolKey | TensorKey, *, run: RunId = MAIN) -> TensorData:
        """See Executor.get_tensor. Asks rank 0 alone: the final outputs are nowhere else."""
        return self._executors[0].get_tensor(key, run=run)

    def tensor_keys(self) -> tuple[tuple[RunId, TensorPoolKey], ...]:
        """Every tensor of every run that any rank still stores, each once."""
        return tuple(dict.fromkeys(entry for executor in self._executors for entry in executor.tensor_keys()))

    def models(self) -> tuple[LoadedModel, ...]:
        """Every model that rank 0 has loaded."""
        return self._executors[0].models()

    def shutdown(self) -> None:
        """End all runs and forget all models on every executor; the default engine is made anew next time."""
        self._shutdown_executors()
        if Engine._default is self:
            Engine._default = None


def _compute_device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is unknown; expected cpu, cuda or cuda:<index>") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; expected cpu, cuda or cuda:<index>")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is not there; this machine has {torch.cuda.device_count()} cuda devices")
    return device
