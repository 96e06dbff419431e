"""ImageEncoder: an image processor and a transformers model as one unit. LOAD_MODEL makes it, IMAGE_ENCODE runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from kdit.errors import CheckpointError
from kdit.models.weights.component_folder import ComponentFolder
from kdit.models.weights.library import check_loading_info, from_folder, library_class, quiet

if TYPE_CHECKING:
    from PIL.Image import Image

CLIP_PROCESSORS = ("CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil", "CLIPFeatureExtractor")


class ImageProcessor(Protocol):
    """The part of a transformers image processor that is used."""

    def __call__(self, images: Sequence[Image], *, return_tensors: str) -> dict[str, Tensor]:
        """``pixel_values`` [B, 3, H, W]."""


class _Encoded(Protocol):
    hidden_states: tuple[Tensor, ...]


class _VisionModel(Protocol):
    dtype: torch.dtype
    device: torch.device

    def __call__(self, pixel_values: Tensor, *, output_hidden_states: bool) -> _Encoded: ...


@dataclass
class ImageEncoder:
    """What an image encoding node needs of one encoder."""

    processor: ImageProcessor
    model: nn.Module

    def encode(self, picture: Image) -> Tensor:
        """The hidden states before the last layer, [1, tokens, D]."""
        model = cast(_VisionModel, self.model)
        with quiet("transformers"):
            pixels = self.processor([picture], return_tensors="pt")["pixel_values"]
        encoded = model(pixels.to(model.device, model.dtype), output_hidden_states=True)
        return encoded.hidden_states[-2]


def load_image_encoder(
    folder: str | Path, processor_folder: str | Path, *, dtype: torch.dtype, device: torch.device | str
) -> ImageEncoder:
    """Image processor and encoder, the latter in ``dtype`` on ``device``, without gradients.

    Raises CheckpointError if a file is damaged or missing, or a tensor is missing, left over or of another shape.
    """
    component = ComponentFolder.at(folder)
    component.check()
    processor = _load_processor(Path(processor_folder))
    with quiet("transformers"), torch.inference_mode(False):
        cls = library_class("transformers", component.class_name, "PreTrainedModel", component.config_path)
        model: nn.Module
        model, info = from_folder(
            lambda: cls.from_pretrained(  # type: ignore[attr-defined]
                str(component.path),
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are reported below, with both shapes
                output_loading_info=True,
            ),
            component.class_name,
            component.path,
        )
        check_loading_info(info, model, component.path)
        return ImageEncoder(processor, model.to(device).requires_grad_(False).eval())


def _load_processor(folder: Path) -> ImageProcessor:
    """transformers' CLIP image processor that resizes with Pillow; the others need torchvision."""
    component = ComponentFolder(folder, CLIP_PROCESSORS[0])
    where = component.config_path
    stated = component.config.get("image_processor_type", CLIP_PROCESSORS[0])
    if stated not in CLIP_PROCESSORS:
        raise CheckpointError(f"{where}: image_processor_type is {stated!r}, expected {CLIP_PROCESSORS[0]!r}")
    with quiet("transformers"):
        cls = library_class("transformers", "CLIPImageProcessorPil", "ImageProcessingMixin", where)
        processor: ImageProcessor = from_folder(
            lambda: cls.from_pretrained(str(folder), local_files_only=True),  # type: ignore[attr-defined]
            "CLIPImageProcessorPil",
            folder,
        )
    return processor
