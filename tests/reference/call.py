"""Turning a Case into call arguments, writing them down as JSON, and reading a written case back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.reference.inputs import Clip, Noise, Picture, Reference
from tests.reference.registry import Case


def reference_class(kind: str) -> type:
    """The MiniMax-H3 reference class of a kind (image, video or audio)."""
    from diffusers.modular_pipelines.minimax_h3 import references

    return getattr(references, f"MiniMaxH3{kind.capitalize()}Reference")


class Inputs:
    """Turns stand-ins into real arguments and remembers how to write them down."""

    def __init__(self) -> None:
        self.images: dict[str, Image.Image] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def convert(self, value: Any, key: str) -> tuple[Any, Any]:
        """Return (argument for the pipeline, JSON description)."""
        if isinstance(value, Picture):
            image = value.render()
            self.images[f"{key}.png"] = image
            return image, {"$image": f"{key}.png"}
        if isinstance(value, Clip):
            return self.convert(value.pictures(), key)
        if isinstance(value, Noise):
            tensor = value.draw()
            self.tensors[f"input.{key}"] = tensor
            return tensor.clone(), {"$tensor": f"input.{key}"}
        if isinstance(value, Reference):
            return self._reference(value, key)
        if isinstance(value, (list, tuple)):
            pairs = [self.convert(v, f"{key}.{i}") for i, v in enumerate(value)]
            return [p[0] for p in pairs], [p[1] for p in pairs]
        return value, value

    def _reference(self, value: Reference, key: str) -> tuple[Any, Any]:
        rate, described = 32000, {"$reference": value.kind}
        arguments: dict[str, Any] = {}
        if value.kind == "image":
            arguments["image"], described["image"] = self.convert(Picture(value.width, value.height, value.seed), key)
        if value.kind == "video":
            clip = Clip(value.width, value.height, value.frames, value.seed).pictures()
            frames = np.stack([np.asarray(p.render()) for p in clip])
            arguments.update(frames=frames, fps=24.0)
            self.tensors[f"input.{key}.frames"] = torch.from_numpy(frames.copy())
            described.update(frames={"$tensor": f"input.{key}.frames"}, fps=24.0)
        if value.seconds > 0:
            t = torch.arange(int(rate * value.seconds), dtype=torch.float64) / rate
            wave = torch.stack([torch.sin(2 * math.pi * (110 + 30 * c + 10 * value.seed) * t) for c in (1, 2)])
            wave = (0.4 * wave + 0.05 * torch.sin(2 * math.pi * 3000 * t)).float()
            arguments.update(audio=wave, sample_rate=rate)
            self.tensors[f"input.{key}.audio"] = wave
            described.update(audio={"$tensor": f"input.{key}.audio"}, sample_rate=rate)
        return reference_class(value.kind)(**arguments), described


def call_arguments(case: Case) -> tuple[dict[str, Any], dict[str, Any], Inputs]:
    inputs, arguments, described = Inputs(), {}, {}
    for key, value in case.call.items():
        arguments[key], described[key] = inputs.convert(value, key)
    arguments["generator"] = torch.Generator("cpu").manual_seed(case.seed)
    described["generator"] = {"$generator": case.seed}
    return arguments, described, inputs


def load_call(folder: Path) -> dict[str, Any]:
    """The call arguments of a written case, from its case.json, PNG and safetensors files alone."""
    tensors = load_file(str(folder / "reference.safetensors"))

    def revive(value: Any) -> Any:
        if isinstance(value, list):
            return [revive(v) for v in value]
        if not isinstance(value, dict):
            return value
        if "$image" in value:
            return Image.open(folder / value["$image"]).convert("RGB")
        if "$tensor" in value:
            return tensors[value["$tensor"]].clone()
        if "$generator" in value:
            return torch.Generator("cpu").manual_seed(value["$generator"])
        arguments = {k: revive(v) for k, v in value.items() if k != "$reference"}
        if "frames" in arguments:
            arguments["frames"] = arguments["frames"].numpy()
        return reference_class(value["$reference"])(**arguments)

    return {k: revive(v) for k, v in json.loads((folder / "case.json").read_text())["call"].items()}
