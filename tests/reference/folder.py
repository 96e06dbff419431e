"""Saving a pipeline as a checkpoint folder and loading it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch

from tests.reference.registry import Family


def save_pipeline(spec: Family, seed: int, folder: Path) -> None:
    pipe = spec.build(seed)
    if spec.modular:
        pipe.save_pretrained(str(folder), overwrite_modular_index=False)
        _make_modular_index_local(folder)
    else:
        pipe.save_pretrained(str(folder))


def _make_modular_index_local(folder: Path) -> None:
    """Point every component of modular_model_index.json at its sub-folder, without a machine path:
    ``pretrained_model_name_or_path`` is null, which means "this repository"."""
    path = folder / "modular_model_index.json"
    index = json.loads(path.read_text())
    for name, entry in index.items():
        if isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], dict):
            entry[2].update(pretrained_model_name_or_path=None, subfolder=name)
            source = folder / name
            if entry[0] is None and source.is_dir():
                entry[:2] = entry[2]["type_hint"]
    path.write_text(json.dumps(index, indent=2) + "\n")


def load_pipeline(spec: Family, folder: Path) -> Any:
    if spec.modular:
        pipe = diffusers.ModularPipeline.from_pretrained(str(folder))
        pipe.load_components(dtype=torch.float32, pretrained_model_name_or_path=str(folder))
    else:
        pipe = getattr(diffusers, spec.pipeline).from_pretrained(str(folder), dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    for component in ("vae", "audio_vae"):
        if isinstance(getattr(pipe, component, None), torch.nn.Module):
            _encode_contiguous(getattr(pipe, component))
    return pipe


def _encode_contiguous(vae: torch.nn.Module) -> None:
    """Give the encoder its image in the ordinary memory layout.

    Images made from PIL arrive as channels-last views, the convolutions keep that layout, and torch's
    CPU group norm sums a channels-last megapixel image so coarsely that the latents are off by 1e-3.
    The layout changes nothing but the accuracy of the reference.
    """
    encode = vae.encode
    vae.encode = lambda x, *args, **kwargs: encode(x.contiguous(), *args, **kwargs)
