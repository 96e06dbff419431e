"""TensorPool: the tensors of one run on one rank, with reference counts. Owned by an Executor."""

from __future__ import annotations

from collections.abc import Collection

from kdit.errors import PinError
from kdit.tensor.tensor_pool_key import TensorPoolKey
from kdit.tensor.tensor_value import TensorData, TensorValue


class TensorPool:
    """Stores tensors until their last consumer has run.

    ``register`` announces how many consumers a key will have, before or after it is put; a key that
    was never registered stays until it is removed or cleared.
    """

    def __init__(self) -> None:
        self._store: dict[TensorPoolKey, TensorValue] = {}
        self._ref_counts: dict[TensorPoolKey, int] = {}

    def put(self, key: TensorPoolKey, data: TensorData) -> None:
        """Store ``data`` under ``key``, in place of what was there; freed at once if nobody will read it."""
        value = TensorValue(data)
        previous = self._store.get(key)
        if previous is not None:
            previous.release()
        self._store[key] = value
        if self._ref_counts.get(key) == 0:
            self.remove(key)

    def get(self, key: TensorPoolKey) -> TensorValue:
        """The value under ``key``; raises PinError if there is none."""
        if key not in self._store:
            raise PinError(f"no tensor {key} in the pool; there are {', '.join(map(str, self._store)) or 'none'}")
        return self._store[key]

    def has(self, key: TensorPoolKey) -> bool:
        """Whether a tensor is stored under ``key``."""
        return key in self._store

    def register(self, key: TensorPoolKey, num_consumers: int) -> None:
        """Set how many times ``key`` will be consumed; at 0 it is freed as soon as it is put."""
        assert num_consumers >= 0, num_consumers
        self._ref_counts[key] = num_consumers
        if num_consumers == 0 and key in self._store:
            self.remove(key)

    def consume(self, key: TensorPoolKey) -> None:
        """Count one consumer of ``key`` as done; the last one frees it. Keys never registered stay."""
        count = self._ref_counts.get(key)
        if count is None:
            return
        if count > 1:
            self._ref_counts[key] = count - 1
        else:
            self.remove(key)

    def remove(self, key: TensorPoolKey) -> None:
        """Free ``key`` and forget its count; no error if it is not there."""
        self._ref_counts.pop(key, None)
        value = self._store.pop(key, None)
        if value is not None:
            value.release()

    def clear(self, exclude: Collection[TensorPoolKey] | None = None) -> None:
        """Free everything, and forget all counts, but for the keys in ``exclude``."""
        kept = frozenset(exclude or ())
        for key in [key for key in {**self._store, **self._ref_counts} if key not in kept]:
            self.remove(key)

    def keys(self) -> tuple[TensorPoolKey, ...]:
        """Keys of all stored tensors, in the order in which they were first put."""
        return tuple(self._store)

    def num_bytes(self) -> int:
        """Bytes of memory held; storage that several tensors share counts once."""
        storages = [tensor.untyped_storage() for value in self._store.values() for tensor in value.tensors()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
