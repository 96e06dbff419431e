"""write_model: a diffusers folder of a given shape with made-up weights. Used by bench/compare.py.

The weights mean nothing; their sizes, names and dtype are those of a real model, and activations stay finite.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from kdit.cli.bench.shape import TOKENIZERS, BenchShape
from kdit.errors import ConfigError
from kdit.models.checkpoint import BUILT_IN, resolve_model_path
from kdit.models.weights.json_file import read_json
from kdit.models.weights.library import library_class, quiet

POOL_SIZE = 4_000_037  # values that are drawn once; prime, so that rows of a matrix do not repeat each other
GAIN = 0.7
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
SCHEDULER_CONFIG = "scheduler_config.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"


def write_model(shape: BenchShape, folder: Path, dtype: str, *, seed: int = 0) -> None:
    """Write every component of ``shape`` in ``dtype``; ``folder`` must not exist.

    The tensors of diffusers' models go to the disk one by one, so that memory does not limit the size.
    """
    folder.mkdir(parents=True)
    pool = torch.randn(POOL_SIZE, generator=torch.Generator().manual_seed(seed))
    index: dict[str, object] = {"_class_name": shape.pipeline, **shape.options}
    with quiet("diffusers"), quiet("transformers"), torch.inference_mode():
        for name, config in shape.configs.items():
            class_name = str(config["_class_name"])
            if name == "scheduler":
                (folder / name).mkdir()
                (folder / name / SCHEDULER_CONFIG).write_text(json.dumps(config, indent=1))
                index[name] = ["diffusers", class_name]
            elif name.startswith("text_encoder"):
                _write_text_encoder(config, folder / name, dtype, pool)
                index[name] = ["transformers", class_name]
            else:
                _write_streamed(config, folder / name, dtype, pool)
                index[name] = ["diffusers", class_name]
    built_in = resolve_model_path(BUILT_IN)
    for name, kind in shape.tokenizers.items():
        shutil.copytree(built_in / TOKENIZERS[kind], folder / name)
        index[name] = read_json(built_in / "model_index.json")[TOKENIZERS[kind]]
    (folder / "model_index.json").write_text(json.dumps(index, indent=1))


def _write_streamed(config: Mapping[str, object], folder: Path, dtype: str, pool: Tensor) -> None:
    """A model of diffusers: built without storage for its names and shapes, its tensors written one by one."""
    cls = library_class("diffusers", str(config["_class_name"]), "ModelMixin", folder)
    try:
        with torch.device("meta"):
            model = cast(nn.Module, cls.from_config(dict(config)))  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{folder.name}: {config['_class_name']} cannot be built like this: {error}") from error
    model.save_config(folder)  # type: ignore[operator]
    norms = _norm_scales(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dims in shapes.items():
        end = position + math.prod(dims) * size
        header[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": dims, "data_offsets": [position, end]}
        position = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with (folder / WEIGHTS).open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name, dims in shapes.items():
            for chunk in _values(name, dims, pool, is_norm=name in norms):
                file.write(chunk.to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy().tobytes())


def _write_text_encoder(config: Mapping[str, object], folder: Path, dtype: str, pool: Tensor) -> None:
    """A model of transformers, small enough to be built whole; the library's own writer knows its tied tensors."""
    values = {key: value for key, value in config.items() if key != "_class_name"}
    cls = library_class("transformers", str(config["_class_name"]), "PreTrainedModel", folder)
    with torch.inference_mode(False), torch.no_grad():
        model = cls(cls.config_class(**values)).to(getattr(torch, dtype))  # type: ignore[attr-defined]
        norms = _norm_scales(model)
        for name, parameter in model.named_parameters():
            flat = torch.cat(list(_values(name, tuple(parameter.shape), pool, is_norm=name in norms)))
            parameter.copy_(flat.view(parameter.shape))
    model.save_pretrained(folder)


def _norm_scales(model: nn.Module) -> frozenset[str]:
    """Names of the one-dimensional weights: the scales of norms."""
    return frozenset(name for name, p in model.named_parameters() if p.ndim < 2 and not name.endswith("bias"))


def _values(name: str, dims: tuple[int, ...], pool: Tensor, *, is_norm: bool) -> Iterator[Tensor]:
    """The values of one tensor, flat and in pieces: N(0, GAIN^2 / fan_in) for matrices and kernels, norms near 1."""
    count = math.prod(dims)
    if is_norm:
        scale, shift = 0.05, 1.0
    elif len(dims) < 2:
        scale, shift = 0.02, 0.0
    else:
        scale, shift = GAIN / math.sqrt(max(1, math.prod(dims[1:]))), 0.0
    start = zlib.crc32(name.encode()) % POOL_SIZE
    drawn = pool[start : start + count] if start + count <= POOL_SIZE else pool.roll(-start)[:count]
    values = drawn * scale + shift
    for offset in range(0, count, POOL_SIZE):
        yield values[: min(POOL_SIZE, count - offset)]
