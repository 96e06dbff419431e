"""load_vae: an autoencoder of diffusers. The LOAD_MODEL node calls it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from kdit.models.weights.component_folder import ComponentFolder
from kdit.models.weights.library import check_loading_info, from_folder, library_class, quiet
from kdit.models.weights.library_tensors import fill_diffusers_model, has_recipes


def load_vae(source: str | Path | ComponentFolder, *, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    """The autoencoder that config.json names, in ``dtype`` on ``device``, without gradients.

    ``source``: its folder, or a component that may lie in a single file.
    Raises CheckpointError if a file is damaged or missing, or a tensor is missing, left over or of another shape.
    """
    component = source if isinstance(source, ComponentFolder) else ComponentFolder.at(source)
    weights = component.open_weights()
    component.log_notices()
    with quiet("diffusers"), torch.inference_mode(False):
        cls = library_class("diffusers", component.class_name, "ModelMixin", component.config_path)
        model: nn.Module
        if has_recipes(weights):
            return fill_diffusers_model(component, dtype).to(device).requires_grad_(False).eval()
        model, info = from_folder(
            lambda: cls.from_pretrained(  # type: ignore[attr-defined]
                str(component.path),
                torch_dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                variant=weights.variant,
                output_loading_info=True,
            ),
            component.class_name,
            component.path,
        )
        check_loading_info(info, model, component.path)
        return model.to(device).requires_grad_(False).eval()
