"""ModelPool: the models that one Executor has loaded. Loader nodes write, infer nodes read."""

from __future__ import annotations

from kdit.errors import PinError
from kdit.models.model_pool_key import ModelPoolKey

LoadedModel = object  # a Network, an autoencoder, a TextEncoder: each node knows what its loader makes


class ModelPool:
    """Loaded models by key; they live as long as the Executor, over all runs."""

    def __init__(self) -> None:
        self._store: dict[ModelPoolKey, LoadedModel] = {}

    def put(self, key: ModelPoolKey, model: LoadedModel) -> None:
        """Store ``model`` under ``key``, in place of what was there."""
        self._store[key] = model

    def get(self, key: ModelPoolKey) -> LoadedModel:
        """The model under ``key``; raises PinError if it is not loaded."""
        if key not in self._store:
            raise PinError(f"no model {key} is loaded; there are {', '.join(map(str, self._store)) or 'none'}")
        return self._store[key]

    def has(self, key: ModelPoolKey) -> bool:
        """Whether a model is stored under ``key``."""
        return key in self._store

    def remove(self, key: ModelPoolKey) -> None:
        """Forget the model under ``key``; no error if it is not there."""
        self._store.pop(key, None)

    def clear(self) -> None:
        """Forget all models."""
        self._store.clear()

    def keys(self) -> tuple[ModelPoolKey, ...]:
        """Keys of all models, in the order of loading."""
        return tuple(self._store)
