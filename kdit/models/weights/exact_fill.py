"""Loads a transformers model whose stored tensors are its parameters by name and shape, without the library's loader.

That loader first compiles the renaming rules of every architecture (0.4 s), and casts with small pages and one copy
more. ``text_encoder`` asks here first and takes the library's way for everything else; both give the same bits.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from kdit.models.weights.component_folder import ComponentFolder
from kdit.models.weights.library import from_folder
from kdit.models.weights.load_tensors import Wanted, load_tensors
from kdit.models.weights.plan import Placement
from kdit.models.weights.weight_files import WeightFiles

PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")


def load_exact(component: ComponentFolder, cls: type, weights: WeightFiles, dtype: torch.dtype) -> nn.Module | None:
    """The model of ``cls`` on the CPU in ``dtype``, or None if its files need more than being read.

    Tied parameters are stored once, under any of their names, and are one parameter in the model.
    """
    if any(info.recipe is not None or info.dtype not in PLAIN_DTYPES for info in weights.tensors.values()):
        return None
    model = from_folder(lambda: _build(component, cls, dtype), component.class_name, component.path)
    sources = _sources(model, weights)
    if sources is None or _keeps_float32(model, dtype) or model.can_generate():  # type: ignore[operator]
        return None
    wanted = {name: Wanted(weights.tensors[name].shape, dtype) for name in sources}
    placements = [Placement(weights.tensors[name], name, 0, 0) for name in sources]
    for name, tensor in load_tensors(wanted, placements, torch.device("cpu")).items():
        parameter = nn.Parameter(tensor, requires_grad=False)
        for alias in sources[name]:
            owner, _, leaf = alias.rpartition(".")
            setattr(model.get_submodule(owner), leaf, parameter)
    unfilled = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not unfilled, f"{type(model).__name__} still has {unfilled} on the meta device"
    return model


def _build(component: ComponentFolder, cls: type, dtype: torch.dtype) -> nn.Module:
    """The model with its buffers as the class computes them, its parameters on the meta device."""
    config = cls.config_class.from_pretrained(str(component.path), local_files_only=True)  # type: ignore[attr-defined]
    config.dtype = dtype
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _parameters_on_meta():
            model: nn.Module = cls(config)
    finally:
        torch.set_default_dtype(before)
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, parameters that this thread registers have no storage."""
    thread = threading.get_ident()

    def hook(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return None  # as it is: tied parameters stay one
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(hook)  # type: ignore[arg-type]  # typed as returning nothing
    try:
        yield
    finally:
        handle.remove()


def _sources(model: nn.Module, weights: WeightFiles) -> dict[str, list[str]] | None:
    """Per stored tensor, the names of the parameter that it is; None unless they are each other's exactly."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    shapes = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
        shapes[name] = tuple(parameter.shape)
    if model.state_dict().keys() != shapes.keys():  # buffers that are stored
        return None
    sources = {}
    for aliases in names.values():
        stored = [name for name in aliases if name in weights.tensors]
        if len(stored) != 1 or weights.tensors[stored[0]].shape != shapes[stored[0]]:
            return None
        sources[stored[0]] = aliases
    return sources if sources.keys() == weights.tensors.keys() else None


def _keeps_float32(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the class wants some of its weights in float32 where it is loaded in ``dtype``."""
    if dtype is torch.float32:
        return False
    always, in_float16 = (
        getattr(model, name, None) for name in ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")
    )
    return bool(always) or (dtype is torch.float16 and bool(in_float16))
