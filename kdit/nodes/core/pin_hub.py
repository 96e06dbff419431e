"""PinHub: the only way in which a running node reads and writes tensors and models. Built by the Executor."""

from __future__ import annotations

from collections.abc import Collection

from kdit.errors import PinError, PinTypeError
from kdit.keys import MAIN, ModelKey, RunId, TensorKey
from kdit.models.model_pool import LoadedModel, ModelPool
from kdit.models.model_pool_key import ModelPoolKey
from kdit.nodes.core.node_def import NodeDef
from kdit.nodes.core.pin_def import InputPins, OutputPins, PinDef
from kdit.tensor.tensor_pool import TensorPool
from kdit.tensor.tensor_pool_key import TensorPoolKey
from kdit.tensor.tensor_value import TensorData, TensorValue


class PinHub:
    """Sandbox of one node in one run: it reads what its edges bring and writes under its own node id."""

    def __init__(
        self,
        node_def: NodeDef,
        *,
        input_defs: Collection[PinDef],
        output_defs: Collection[PinDef],
        input_pins: InputPins,
        tensor_pool: TensorPool,
        model_pool: ModelPool,
        run: RunId = MAIN,
    ) -> None:
        self._node_def = node_def
        self._input_defs = frozenset(input_defs)
        self._output_defs = frozenset(output_defs)
        self._input_pins = dict(input_pins)
        self._tensor_pool = tensor_pool
        self._model_pool = model_pool
        self._run = run
        self._written: OutputPins = {}
        self._notices: list[str] = []
        for pin, key in self._input_pins.items():
            self._check_declared(pin, self._input_defs, "input")
            if isinstance(pin, TensorKey) != isinstance(key, TensorPoolKey):
                raise PinTypeError(f"{node_def}: input {pin.name} cannot be bound to {key!r}")

    @property
    def node_def(self) -> NodeDef:
        """The node that reads and writes here."""
        return self._node_def

    @property
    def run(self) -> RunId:
        """The run whose tensors these are."""
        return self._run

    @property
    def written(self) -> OutputPins:
        """The outputs that the node has written so far."""
        return dict(self._written)

    @property
    def notices(self) -> tuple[str, ...]:
        """What the node has told so far."""
        return tuple(self._notices)

    def notice(self, message: str) -> None:
        """Tell the caller of the run something that is no error: what was cut, what had no effect."""
        self._notices.append(message)

    def get_tensor(self, key: TensorKey) -> TensorValue | None:
        """The tensor on the input ``key``; None if nothing is connected to it.

        Raises PinError if the node does not declare the input, or if the connected tensor is gone.
        """
        self._check_declared(key, self._input_defs, "input")
        source = self._input_pins.get(key)
        if source is None:
            return None
        assert isinstance(source, TensorPoolKey)
        if not self._tensor_pool.has(source):
            raise PinError(f"{self._node_def}: the tensor for input {key.name}, {source}, is not there")
        return self._tensor_pool.get(source)

    def has_tensor(self, key: TensorKey) -> bool:
        """Whether the input ``key`` is connected and its tensor is there."""
        self._check_declared(key, self._input_defs, "input")
        source = self._input_pins.get(key)
        return isinstance(source, TensorPoolKey) and self._tensor_pool.has(source)

    def put_tensor(self, key: TensorKey, data: TensorData) -> None:
        """Write the output ``key``; raises PinError if the node does not declare it."""
        self._check_declared(key, self._output_defs, "output")
        target = TensorPoolKey(self._node_def.node_id, key)
        self._tensor_pool.put(target, data)
        self._written[key] = target

    def get_model(self, key: ModelKey | None = None) -> LoadedModel:
        """The model on the pin ``key``, by default the node's own ``model_key``.

        Raises PinError if the pin is not declared or not connected, or if the model is not loaded.
        """
        pin = key or self._node_def.model_key
        if pin is None:
            raise PinError(f"{self._node_def} has no model_key; name the model to get")
        self._check_declared(pin, self._input_defs, "input")
        source = self._input_pins.get(pin)
        if source is None:
            raise PinError(f"{self._node_def}: nothing is connected to model pin {pin.name}; connect a loader")
        assert isinstance(source, ModelPoolKey)
        return self._model_pool.get(source)

    def put_model(self, key: ModelKey, model: LoadedModel) -> None:
        """Store a loaded model as the output ``key``; raises PinError if the node does not declare it."""
        self._check_declared(key, self._output_defs, "output")
        target = ModelPoolKey(self._node_def.node_id, key)
        self._model_pool.put(target, model)
        self._written[key] = target

    def written_tensors(self) -> dict[TensorKey, TensorData]:
        """The output tensors written so far, but for those that nobody will read."""
        return {
            key.pin: self._tensor_pool.get(key).data
            for key in self._written.values()
            if isinstance(key, TensorPoolKey) and self._tensor_pool.has(key)
        }

    def discard_written(self) -> None:
        """Take back every output written so far; the Executor calls it when the node has failed."""
        for target in self._written.values():
            if isinstance(target, TensorPoolKey):
                self._tensor_pool.remove(target)
            else:
                self._model_pool.remove(target)
        self._written.clear()

    def _check_declared(self, pin: PinDef, declared: frozenset[PinDef], what: str) -> None:
        if pin not in declared:
            names = ", ".join(sorted(item.name for item in declared)) or "none"
            raise PinError(f"{self._node_def} declares no {what} {pin.name}; declared: {names}")
