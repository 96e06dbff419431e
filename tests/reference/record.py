"""Recording what happens inside a call: random draws, encoders, denoisers, autoencoders."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.reference.registry import Family

MAX_TENSOR = 2_000_000  # elements; larger intermediates are left out, larger outputs are strided


def flatten(prefix: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, np.ndarray):
        yield prefix, torch.from_numpy(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield prefix, torch.tensor(value)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from flatten(f"{prefix}.{i}", item)


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _detached(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_detached(v) for v in value) if type(value) in (list, tuple) else value
    return value


@dataclass
class Record:
    """Everything seen during one call."""

    draws: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    first_call: dict[str, tuple[torch.nn.Module, dict[str, Any]]] = field(default_factory=dict)

    def add(self, prefix: str, value: Any, limit: int = MAX_TENSOR) -> None:
        for key, tensor in flatten(prefix, value):
            if tensor.numel() <= limit:
                self.tensors[key] = tensor.detach().clone().contiguous()


class _Hooks:
    """Everything that ``recording`` puts on a pipeline, and how to take it off again."""

    def __init__(self) -> None:
        self.record = Record()
        self.undo: list[Callable[[], object]] = []

    def on_draws(self, module: Any) -> None:
        """Record every normal draw that ``module`` makes through diffusers' randn_tensor."""
        original, record = module.randn_tensor, self.record

        def draw(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = original(*args, **kwargs)
            key = f"noise.{len(record.draws)}"
            record.draws.append({"key": key, "shape": list(tensor.shape), "by": module.__name__.split(".")[-1]})
            record.add(key, tensor)
            return tensor

        module.randn_tensor = draw
        self.undo.append(lambda: setattr(module, "randn_tensor", original))

    def on_module(self, component: str, module: torch.nn.Module, kind: str, limit: int) -> None:
        """Record the inputs, and a denoiser's output, of the first ``limit`` calls."""
        names, record = list(inspect.signature(module.forward).parameters), self.record

        def after(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            index = record.counts.get(component, 0)
            record.counts[component] = index + 1
            if index >= limit:
                return
            bound = {**dict(zip(names, args, strict=False)), **kwargs}
            if component not in record.first_call:
                record.first_call[component] = (module, _detached(bound))
            prefix = f"{kind}.{component}.call{index}"
            for key, value in bound.items():
                record.add(f"{prefix}.in.{key}", value, MAX_TENSOR if index == 0 else MAX_TENSOR // 40)
            if kind == "denoiser":
                value = output[0] if isinstance(output, tuple) and len(output) == 1 else output
                value = getattr(value, "sample", value)
                if isinstance(value, (list, tuple)) and len(value) == 1:
                    value = value[0]
                record.add(f"{prefix}.out", value)

        self.undo.append(module.register_forward_hook(after, with_kwargs=True).remove)

    def on_autoencoder(self, component: str, vae: Any, method: str) -> None:
        """Record the latents that ``vae`` decodes, or the means that it encodes to."""
        original, record = getattr(vae, method), self.record

        def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            index = record.counts.get(f"{component}.{method}", 0)
            record.counts[f"{component}.{method}"] = index + 1
            result = original(x, *args, **kwargs)
            if method == "decode":
                record.add(f"{component}.decode.call{index}.in", x)
            else:
                first = result[0] if isinstance(result, tuple) else getattr(result, "latent_dist", result)
                record.add(f"{component}.encode.call{index}.mean", getattr(first, "mean", None))
            record.first_call.setdefault(f"{component}.{method}", (vae, {"x": x.detach().clone()}))
            return result

        wrapped = method in vars(vae)
        setattr(vae, method, call)
        self.undo.append(lambda: setattr(vae, method, original) if wrapped else delattr(vae, method))


@contextmanager
def recording(pipe: Any, spec: Family) -> Iterator[Record]:
    """Hook the random draws, the encoders, the denoisers and the autoencoders of ``pipe``."""
    hooks = _Hooks()
    for name, module in list(sys.modules.items()):
        if name.startswith("diffusers.") and not name.endswith("torch_utils") and "randn_tensor" in vars(module):
            hooks.on_draws(module)
    for component in spec.denoisers:
        if getattr(pipe, component, None) is not None:
            hooks.on_module(component, getattr(pipe, component), "denoiser", 2)
    for component in ("text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder", "connectors"):
        if isinstance(getattr(pipe, component, None), torch.nn.Module):
            module = getattr(pipe, component)
            # MiniMax-H3 calls the inner model; a hook on it sees both ways of calling.
            inner = module.model if spec.modular and hasattr(module, "model") else module
            hooks.on_module(component, inner, "encoder", 2)
    for component in ("vae", "audio_vae"):
        if isinstance(getattr(pipe, component, None), torch.nn.Module):
            for method in ("encode", "decode"):
                hooks.on_autoencoder(component, getattr(pipe, component), method)
    try:
        yield hooks.record
    finally:
        for action in reversed(hooks.undo):
            action()
