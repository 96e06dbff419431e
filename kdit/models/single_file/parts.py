"""split_parts: takes the prefixes off a file's names and tells apart the models that it holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from kdit.models.weights.header import TensorInfo

Tensors = dict[str, TensorInfo]

NETWORK, VAE = "transformer", "vae"
_WHOLE = (  # prefixes of checkpoints that hold several models -> part
    (re.compile(r"model\.diffusion_model\."), NETWORK),
    (re.compile(r"(?:first_stage_model|vae)\."), VAE),
    (re.compile(r"text_encoders\.(\w+?)\.(?:transformer\.)?"), None),  # the part has the encoder's name
)
_ALONE = ("model.diffusion_model.", "diffusion_model.", "transformer.")  # prefixes of a network by itself


class Parts(NamedTuple):
    """The models of one file, each with its names less the prefix, and tensors that belong to none."""

    models: dict[str, Tensors]
    others: Tensors


def split_parts(tensors: Mapping[str, TensorInfo]) -> Parts:
    """A file in which every name is bare, or has one and the same prefix, is one part: the "transformer"."""
    for prefix in _ALONE:
        if all(name.startswith(prefix) for name in tensors):
            return Parts({NETWORK: {name.removeprefix(prefix): info for name, info in tensors.items()}}, {})
    parts = Parts({}, {})
    for name, info in tensors.items():
        for pattern, part in _WHOLE:
            if match := pattern.match(name):
                parts.models.setdefault(part or match[1], {})[name[match.end() :]] = info
                break
        else:
            parts.others[name] = info
    return parts if parts.models else Parts({NETWORK: parts.others}, {})
