"""Executor: owns the pools, nodes and open states of one rank and runs ONE node at a time. Called by the Engine."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kdit.config import ParallelConfig
from kdit.errors import GraphError, InputError, PinError
from kdit.executor.distributed_group import DistributedGroupManager
from kdit.keys import MAIN, RunId, TensorKey
from kdit.models.model_pool import LoadedModel, ModelPool
from kdit.models.model_pool_key import ModelPoolKey
from kdit.nodes.core.device_info import DeviceInfo
from kdit.nodes.core.dispatch_policy import NodeDispatchPolicy, dispatch_policy
from kdit.nodes.core.factory import create_node, declared_inputs, declared_outputs
from kdit.nodes.core.node import Node, SteppableNode
from kdit.nodes.core.node_context import NodeContext
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.core.pin_def import InputPins, OutputPins
from kdit.nodes.core.pin_hub import PinHub
from kdit.nodes.core.step_report import StepReport
from kdit.tensor.tensor_pool import TensorPool
from kdit.tensor.tensor_pool_key import STAGING_NODE_ID, TensorPoolKey
from kdit.tensor.tensor_value import TensorData

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _OpenState:
    """A SteppableNode's state between its steps, and the models it may read when it is closed."""

    state: object
    model_pins: InputPins


class Executor:
    """One ordered stream of commands, the same on all ranks of a replica.

    A command holds the lock, runs in inference mode, and ends in a status that the ranks agree on: if one
    fails, all raise its error. A failed command leaves no outputs behind; inputs, and the states of open
    runs, stay as they are until ``end_run``.
    """

    def __init__(
        self, device_info: DeviceInfo, parallel_config: ParallelConfig, group: DistributedGroupManager
    ) -> None:
        self.device_info = device_info
        self._parallel_config = parallel_config
        self._group = group
        self._lock = threading.Lock()
        self._model_pool = ModelPool()
        self._tensor_pools: dict[RunId, TensorPool] = {}
        self._open_states: dict[tuple[int, RunId], _OpenState] = {}
        self._node_cache: dict[int, Node] = {}
        self._notices: dict[RunId, list[str]] = {}
        self._released: deque[RunId | Collection[int]] = deque()

    # -- running nodes

    def run_node(
        self, node_def: NodeDef, input_pins: InputPins, context: NodeContext, *, run: RunId = MAIN
    ) -> OutputPins:
        """Run one node and return where its outputs are; its input tensors count as consumed."""
        with self._command(f"run {node_def}", run):
            with self._agreed():
                node = self._get_or_create_node(node_def)
                pins = self._build_pin_hub(node_def, input_pins, run)
                policy = dispatch_policy(node_def, self._parallel_config)
            with _all_or_nothing(pins):
                with self._agreed():
                    self._pre_sync_tensors(node_def, input_pins, policy, run)
                    if self._is_active_rank(policy):
                        node.run(pins, context=self._inject_context_defaults(context))
                self._post_sync_tensors(pins, policy)
            self._consume_input_tensors(input_pins, run)
            self._notices.setdefault(run, []).extend(pins.notices)
            return pins.written

    def open_generate(
        self, node_def: NodeDef, input_pins: InputPins, context: NodeContext, *, run: RunId = MAIN
    ) -> None:
        """Open a steppable node for ``run``; the executor keeps the state, the inputs are consumed."""
        with self._command(f"open {node_def}", run):
            with self._agreed():
                node = self._steppable(node_def)
                if (node_def.node_id, run) in self._open_states:
                    raise InputError(f"{node_def} is already open for run {run}; close or end the run first")
                pins = self._build_pin_hub(node_def, input_pins, run)
                policy = dispatch_policy(node_def, self._parallel_config)
                self._pre_sync_tensors(node_def, input_pins, policy, run)
                state = node.open(pins, context=self._inject_context_defaults(context))
                self._notices.setdefault(run, []).extend(pins.notices)
            models: InputPins = {pin: key for pin, key in input_pins.items() if isinstance(key, ModelPoolKey)}
            self._open_states[node_def.node_id, run] = _OpenState(state, models)
            self._consume_input_tensors(input_pins, run)

    def step_generate(self, node_def: NodeDef, runs: tuple[RunId, ...]) -> tuple[StepReport, ...]:
        """One step of every run in ``runs``, together; one report per run, in the same order."""
        with self._command(f"step {node_def}", *runs), self._agreed():
            node = self._steppable(node_def)
            if not runs or len(set(runs)) != len(runs):
                raise InputError(f"{node_def}: a step takes each run once, and one at least, got {runs}")
            reports = node.step([self._open_state(node_def, run).state for run in runs])
            assert tuple(report.run for report in reports) == runs, (reports, runs)
            return reports

    def close_generate(self, node_def: NodeDef, *, run: RunId = MAIN) -> OutputPins:
        """Write the outputs of an open node, drop its state, and return where the outputs are."""
        with self._command(f"close {node_def}", run):
            with self._agreed():
                node = self._steppable(node_def)
                opened = self._open_state(node_def, run)
                pins = self._build_pin_hub(node_def, opened.model_pins, run)
            with _all_or_nothing(pins):
                with self._agreed():
                    node.close(opened.state, pins)
                self._post_sync_tensors(pins, dispatch_policy(node_def, self._parallel_config))
            del self._open_states[node_def.node_id, run]
            return pins.written

    def peek_generate(self, node_def: NodeDef, *, run: RunId = MAIN) -> dict[str, Tensor]:
        """What the open node shows of ``run`` between two steps."""
        with self._command(f"peek {node_def}", run), self._agreed():
            return self._steppable(node_def).peek(self._open_state(node_def, run).state)

    def steps_left(self, node_def: NodeDef, *, run: RunId = MAIN) -> int:
        """How many steps the open node still needs for ``run``."""
        with self._command(f"count steps of {node_def}", run), self._agreed():
            return self._steppable(node_def).steps_left(self._open_state(node_def, run).state)

    def notices(self, run: RunId) -> tuple[str, ...]:
        """What the nodes of ``run`` have told on this rank. Not collective."""
        with self._command("read notices", run):
            return tuple(self._notices.get(run, ()))

    def end_run(self, run: RunId) -> None:
        """Free every tensor and drop every open state of ``run``; again or for an unknown run it does nothing."""
        with self._command("end", run), self._agreed():
            self._drop_run(run)

    # -- tensors and models

    def feed_tensors(self, tensors: Mapping[TensorKey, TensorData], *, run: RunId = MAIN) -> None:
        """Put tensors into the staging area of ``run``; the FEED_TENSOR node of each key takes it from there."""
        with self._command("feed", run), self._agreed():
            for key, data in tensors.items():
                _check_fed(key, data)
            for key, data in tensors.items():
                staged = TensorPoolKey(STAGING_NODE_ID, key)
                self._pool(run).register(staged, 1)
                self._pool(run).put(staged, data)

    def put_tensors(
        self, tensors: Mapping[TensorPoolKey, TensorData] | Mapping[TensorKey, TensorData], *, run: RunId = MAIN
    ) -> None:
        """Write tensors to pins, as if the nodes had run; a bare TensorKey means the staging area."""
        with self._command("put", run), self._agreed():
            placed = {_staged(key): data for key, data in tensors.items()}
            for key, data in placed.items():
                _check_fed(key.pin, data)
            for key, data in placed.items():
                self._pool(run).put(key, data)

    def get_tensor(self, key: TensorPoolKey | TensorKey, *, run: RunId = MAIN) -> TensorData:
        """The tensor of one pin; of a bare TensorKey that of the one node of ``run`` that wrote it, or, if no node
        did, the staged one; PinError if none.

        Not collective: an output that only rank 0 keeps is asked of rank 0.
        """
        with self._command(f"get {key}", run):
            pool = self._tensor_pools.get(run) or TensorPool()
            data = pool.get(key if isinstance(key, TensorPoolKey) else _only_output(pool, key, run)).data
            return list(data) if isinstance(data, list) else data

    def register_tensor(self, key: TensorPoolKey, num_consumers: int, *, run: RunId = MAIN) -> None:
        """Announce how many nodes will read ``key``."""
        with self._command(f"register {key}", run), self._agreed():
            self._pool(run).register(key, num_consumers)

    def consume_tensor(self, key: TensorPoolKey, *, run: RunId = MAIN) -> None:
        """Count one reader of ``key`` as done; the last one frees it."""
        with self._command(f"consume {key}", run), self._agreed():
            if run in self._tensor_pools:
                self._tensor_pools[run].consume(key)

    def clear_all_tensors(
        self, exclude: Collection[TensorPoolKey | TensorKey] | None = None, *, run: RunId = MAIN
    ) -> None:
        """Free all tensors of ``run`` but those in ``exclude``; a bare TensorKey keeps every tensor of that name."""
        with self._command("clear", run), self._agreed():
            pool, kept = self._tensor_pools.get(run), set(exclude or ())
            if pool is not None:
                pool.clear([key for key in pool.keys() if key in kept or key.pin in kept])

    def tensor_keys(self) -> tuple[tuple[RunId, TensorPoolKey], ...]:
        """Every tensor of every run on this rank. Not collective."""
        with self._command("list tensors"):
            return tuple((run, key) for run, pool in self._tensor_pools.items() for key in pool.keys())

    def models(self) -> tuple[LoadedModel, ...]:
        """Every model that this rank has loaded, in that order. Not collective."""
        with self._command("list models"):
            return tuple(self._model_pool.get(key) for key in self._model_pool.keys())

    def forget_nodes(self, node_ids: Collection[int]) -> None:
        """Forget these nodes and the models that they have loaded; other graphs keep theirs."""
        with self._command("forget nodes"), self._agreed():
            self._drop_nodes(node_ids)

    def release_later(self, what: RunId | Collection[int]) -> None:
        """End a run or forget nodes whose owner was garbage-collected: now, or before the next command.

        A collector may call this in the middle of a command, also in the thread that holds the lock, so it
        never waits.
        """
        self._released.append(what)
        if self._lock.acquire(blocking=False):
            try:
                self._drop_all_released()
            finally:
                self._lock.release()

    def clear_models(self) -> None:
        """Forget all models and nodes."""
        with self._command("clear models"), self._agreed():
            self._model_pool.clear()
            self._node_cache.clear()

    def shutdown(self) -> None:
        """End all runs and forget all models; the executor can be used again."""
        with self._command("shut down"), self._agreed():
            for run in {*self._tensor_pools, *(run for _, run in self._open_states)}:
                self._drop_run(run)
            self._model_pool.clear()
            self._node_cache.clear()

    # -- the pieces of a command

    @contextmanager
    def _command(self, what: str, *runs: RunId) -> Iterator[None]:
        with self._lock, torch.inference_mode():
            logger.debug("run %s, rank %d: %s", ",".join(runs) or "-", self._group.rank_id, what)
            self._drop_all_released()
            yield

    @contextmanager
    def _agreed(self) -> Iterator[None]:
        """A part of a command that all ranks enter, and leave with the same error or with none.

        This is the failure boundary of the engine: whatever a node raises must reach the other ranks,
        which would else wait for this one for ever.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001
            error = raised
        agreed = self._group.agree(error)
        if agreed is not None:
            logger.debug("rank %d: failed with %s: %s", self._group.rank_id, type(agreed).__name__, agreed)
            raise agreed

    def _get_or_create_node(self, node_def: NodeDef) -> Node:
        if node_def.node_id not in self._node_cache:
            self._node_cache[node_def.node_id] = create_node(node_def)
        return self._node_cache[node_def.node_id]

    def _steppable(self, node_def: NodeDef) -> SteppableNode:
        node = self._get_or_create_node(node_def)
        if not isinstance(node, SteppableNode):
            raise GraphError(f"{node_def} does not run in steps; use run_node")
        policy = dispatch_policy(node_def, self._parallel_config)
        assert policy is NodeDispatchPolicy.ALL_ALL_ALL, policy  # every rank holds its own state
        return node

    def _open_state(self, node_def: NodeDef, run: RunId) -> _OpenState:
        opened = self._open_states.get((node_def.node_id, run))
        if opened is None:
            open_runs = ", ".join(other for node_id, other in self._open_states if node_id == node_def.node_id)
            raise InputError(f"{node_def} is not open for run {run}; open runs: {open_runs or 'none'}")
        return opened

    def _build_pin_hub(self, node_def: NodeDef, input_pins: InputPins, run: RunId) -> PinHub:
        return PinHub(
            node_def,
            input_defs=declared_inputs(node_def),
            output_defs=declared_outputs(node_def),
            input_pins=input_pins,
            tensor_pool=self._pool(run),
            model_pool=self._model_pool,
            run=run,
        )

    def _inject_context_defaults(self, context: NodeContext) -> NodeContext:
        return replace(context, device=self.device_info)

    def _is_active_rank(self, policy: NodeDispatchPolicy) -> bool:
        return policy is NodeDispatchPolicy.ALL_ALL_ALL or self._group.rank_id == 0

    def _pre_sync_tensors(
        self, node_def: NodeDef, input_pins: InputPins, policy: NodeDispatchPolicy, run: RunId
    ) -> None:
        """Check that the connected inputs are on every rank that runs the node.

        A rank without them would compute something else than its neighbours, or wait for ever in the
        node's first collective. Ranks that do not run it may lack them: a picture decoded on rank 0 is
        saved there.
        """
        if not self._is_active_rank(policy):
            return
        for pin, key in input_pins.items():
            if isinstance(key, TensorPoolKey) and not self._pool(run).has(key):
                where = f"not on rank {self._group.rank_id} in run {run}"
                raise PinError(f"{node_def}: the tensor for input {pin.name}, {key}, is {where}")

    def _post_sync_tensors(self, pins: PinHub, policy: NodeDispatchPolicy) -> None:
        """Bring the outputs of rank 0 to the others, if the policy says so."""
        if policy is not NodeDispatchPolicy.R0_R0_BCAST or self._group.world_size == 1:
            return
        with self._agreed():
            if self._group.rank_id == 0:
                self._group.broadcast_tensors(pins.written_tensors())
            else:
                for key, data in self._group.broadcast_tensors(None).items():
                    pins.put_tensor(key, data)

    def _consume_input_tensors(self, input_pins: InputPins, run: RunId) -> None:
        for key in input_pins.values():
            if isinstance(key, TensorPoolKey):
                self._pool(run).consume(key)

    def _pool(self, run: RunId) -> TensorPool:
        return self._tensor_pools.setdefault(run, TensorPool())

    def _drop_all_released(self) -> None:
        while self._released:
            what = self._released.popleft()
            if isinstance(what, str):
                self._drop_run(RunId(what))
            else:
                self._drop_nodes(what)

    def _drop_nodes(self, node_ids: Collection[int]) -> None:
        loaded = self._model_pool.keys()
        for key in loaded:
            if key.node_id in node_ids:
                self._model_pool.remove(key)
        for node_id in node_ids:
            self._node_cache.pop(node_id, None)

    def _drop_run(self, run: RunId) -> None:
        self._notices.pop(run, None)
        pool = self._tensor_pools.pop(run, None)
        if pool is not None:
            pool.clear()
        for key in [key for key in self._open_states if key[1] == run]:
            del self._open_states[key]


@contextmanager
def _all_or_nothing(pins: PinHub) -> Iterator[None]:
    """A node that fails, or is interrupted, leaves none of its outputs behind."""
    try:
        yield
    except BaseException:
        pins.discard_written()
        raise


def _staged(key: TensorPoolKey | TensorKey) -> TensorPoolKey:
    return key if isinstance(key, TensorPoolKey) else TensorPoolKey(STAGING_NODE_ID, key)


def _check_fed(key: TensorKey, data: object) -> None:
    items = data if isinstance(data, list) else [data]
    for item in items:
        if not isinstance(item, Tensor):
            raise InputError(f"{key.name}: got {type(item).__name__}, expected a tensor or a list of tensors")


def _only_output(pool: TensorPool, key: TensorKey, run: RunId) -> TensorPoolKey:
    outputs = [item for item in pool.keys() if item.node_id != STAGING_NODE_ID]
    found = [item for item in outputs if item.pin is key]
    if not found and pool.has(_staged(key)):
        return _staged(key)
    if len(found) != 1:
        listed = ", ".join(map(str, found or outputs)) or "none"
        raise PinError(f"run {run}: {len(found)} tensors are named {key.name}, expected one; there are {listed}")
    return found[0]
