"""TextEncoder: a tokenizer and a transformers model as one loaded unit. LOAD_MODEL makes it, TEXT_ENCODE runs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from kdit.errors import CheckpointError, CheckpointMissingError
from kdit.models.weights.component_folder import (
    TOKENIZER_CONFIG,
    ComponentFolder,
    tokenizer_faults,
)
from kdit.models.weights.exact_fill import load_exact
from kdit.models.weights.json_file import read_json
from kdit.models.weights.library import check_loading_info, from_folder, library_class, quiet
from kdit.models.weights.library_tensors import fill_transformers_model, has_recipes
from kdit.models.weights.weight_files import raise_first

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class TextEncoder:
    """What a text encoding node needs of one encoder."""

    tokenizer: PreTrainedTokenizerBase
    model: nn.Module


def load_text_encoder(
    source: str | Path | ComponentFolder,
    tokenizer_folder: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> TextEncoder:
    """Tokenizer and encoder, the latter in ``dtype`` on ``device``, without gradients.

    ``source``: the encoder's folder, or a component that may lie in a single file.
    The classes are transformers' own, by the names in the folders' configs. What a class keeps in float32
    stays so. Raises CheckpointError if a file is damaged or missing, or a tensor is missing, left over or of
    another shape.
    """
    component = source if isinstance(source, ComponentFolder) else ComponentFolder.at(source)
    component.check()
    tokenizer = load_tokenizer(tokenizer_folder)
    model = _load_model(component, dtype, device)
    _check_vocabulary(tokenizer, model, Path(tokenizer_folder), component)
    return TextEncoder(tokenizer, model)


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder; raises CheckpointError naming the file or package that is missing."""
    folder = Path(folder)
    raise_first(tuple(tokenizer_faults(folder)))
    if (folder / "tokenizer.json").is_file():
        read_json(folder / "tokenizer.json")  # the tokenizers library tells less
    class_name, where = _tokenizer_class(folder)
    with quiet("transformers"):
        cls = library_class("transformers", class_name, "PreTrainedTokenizerBase", where)
        tokenizer: PreTrainedTokenizerBase = from_folder(
            lambda: cls.from_pretrained(str(folder), local_files_only=True),  # type: ignore[attr-defined]
            class_name,
            folder,
        )
    return tokenizer


def _load_model(component: ComponentFolder, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    with quiet("transformers"), torch.inference_mode(False):
        cls = library_class("transformers", component.class_name, "PreTrainedModel", component.config_path)
        model: nn.Module
        weights = component.open_weights()
        component.log_notices()
        if has_recipes(weights):
            return fill_transformers_model(component, dtype).to(device).requires_grad_(False).eval()
        if (exact := load_exact(component, cls, weights, dtype)) is not None:
            return exact.to(device).requires_grad_(False).eval()
        model, info = from_folder(
            lambda: cls.from_pretrained(  # type: ignore[attr-defined]
                str(component.path),
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                variant=weights.variant,
                ignore_mismatched_sizes=True,  # they are reported below, with both shapes
                output_loading_info=True,
            ),
            component.class_name,
            component.path,
        )
        check_loading_info(info, model, component.path)
        return model.to(device).requires_grad_(False).eval()


def _tokenizer_class(folder: Path) -> tuple[str, Path]:
    """Class name and the file that states it: the tokenizer's own config, else the checkpoint's index."""
    own, index = folder / TOKENIZER_CONFIG, folder.parent / "model_index.json"
    if own.is_file():
        stated = read_json(own).get("tokenizer_class")
        if isinstance(stated, str):
            return stated, own
    if index.is_file():
        entry = read_json(index).get(folder.name)
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str):
            return entry[1], index
    raise CheckpointMissingError(f"component {folder.name}: no tokenizer_class in {own}, and {index} does not name it")


def _check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, model: nn.Module, folder: Path, component: ComponentFolder
) -> None:
    """A tokenizer of another model gives ids that the encoder has no embedding for."""
    config = getattr(model, "config", None)
    rows = getattr(config, "vocab_size", None)
    if isinstance(rows, int) and tokenizer.vocab_size > rows:
        raise CheckpointError(
            f"component {folder.name}: the tokenizer in {folder} has {tokenizer.vocab_size} tokens,"
            f" {component.name} embeds {rows}; they are not of one model"
        )
