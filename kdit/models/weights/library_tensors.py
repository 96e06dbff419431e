"""Fills a model of transformers or diffusers from described tensors, where the library cannot read the files itself.

Those of single files have other names, those of scaled fp8 weights other values.
load_vae and load_text_encoder call it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kdit.models.weights.component_folder import ComponentFolder
from kdit.models.weights.library import check_loading_info, from_folder, library_class
from kdit.models.weights.tensor_reader import TensorReader
from kdit.models.weights.weight_files import WeightFiles


def has_recipes(weights: WeightFiles) -> bool:
    """Whether the stored tensors are not the model's own as they stand."""
    return any(info.recipe is not None for info in weights.tensors.values())


def fill_transformers_model(component: ComponentFolder, dtype: torch.dtype) -> nn.Module:
    """The transformers model of the component's config on the CPU; what its class keeps in float32 stays so.

    Raises CheckpointError if a tensor is missing, left over or of another shape.
    """
    cls = library_class("transformers", component.class_name, "PreTrainedModel", component.config_path)
    # float16 models keep some weights in float32, so nothing may be rounded before
    state = _state(component.open_weights(), torch.float32 if dtype is torch.float16 else dtype)
    model: nn.Module
    model, info = from_folder(
        lambda: cls.from_pretrained(  # type: ignore[attr-defined]
            None,
            config=cls.config_class.from_dict(component.config),  # type: ignore[attr-defined]
            state_dict=state,
            dtype=dtype,
            ignore_mismatched_sizes=True,  # they are reported below, with both shapes
            output_loading_info=True,
        ),
        component.class_name,
        component.path,
    )
    check_loading_info(info, model, component.path)
    return model


def fill_diffusers_model(component: ComponentFolder, dtype: torch.dtype) -> nn.Module:
    """The diffusers model of the component's config on the CPU. Raises CheckpointError as above."""
    cls = library_class("diffusers", component.class_name, "ModelMixin", component.config_path)
    model: nn.Module = from_folder(
        lambda: cls.from_config(component.config),  # type: ignore[attr-defined]
        component.class_name,
        component.path,
    )
    model = model.to(dtype)
    own = model.state_dict()
    weights = component.open_weights()
    shapes = {name: info.shape for name, info in weights.tensors.items()}
    info = {
        "missing_keys": own.keys() - shapes.keys(),
        "unexpected_keys": shapes.keys() - own.keys(),
        "mismatched_keys": {
            (name, shapes[name], tuple(own[name].shape))
            for name in own.keys() & shapes.keys()
            if tuple(own[name].shape) != shapes[name]
        },
    }
    check_loading_info(info, model, component.path)
    model.load_state_dict(_state(weights, dtype))
    return model


def _state(weights: WeightFiles, dtype: torch.dtype) -> dict[str, Tensor]:
    in_file_order = sorted(weights.tensors.values(), key=lambda info: (info.path, info.start))
    with TensorReader() as reader:
        return {info.name: reader.read(info).to(dtype) for info in in_file_order}
