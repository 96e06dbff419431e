"""Copies of checkpoint folders and the ways to damage them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

NETWORK_FILE = "diffusion_pytorch_model.safetensors"
NETWORK_INDEX = NETWORK_FILE + ".index.json"


def clone(folder: Path, target: Path) -> Path:
    """A copy whose files are links; change them through ``overwrite`` and ``unlink`` only."""

    def link(source: str, copy: str) -> None:
        try:
            os.link(source, copy)
        except OSError:
            shutil.copyfile(source, copy)

    shutil.copytree(folder, target, copy_function=link)
    return target


def overwrite(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def edit_json(path: Path, **changes: object) -> None:
    """Set entries of a JSON object; None removes one."""
    table = {**json.loads(path.read_text()), **changes}
    overwrite(path, json.dumps({key: value for key, value in table.items() if value is not None}).encode())


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite a safetensors file after ``change`` has worked on its tensors."""
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path)


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the header of a safetensors file, its data untouched."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    overwrite(path, with_header(json.dumps(header).encode(), data[8 + length :]))


def with_header(header: bytes, data: bytes = b"") -> bytes:
    """A safetensors file of these parts."""
    return len(header).to_bytes(8, "little") + header + data


def shard(folder: Path, stem: str = "diffusion_pytorch_model", num_shards: int = 3) -> list[str]:
    """Split the single file of a component; tensors go to the shards in turn. Returns the shards' names."""
    single = folder / f"{stem}.safetensors"
    tensors = load_file(single)
    single.unlink()
    names = [f"{stem}-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    weight_map: dict[str, str] = {name: names[i % num_shards] for i, name in enumerate(sorted(tensors))}
    for name in names:
        save_file({key: tensors[key] for key, where in weight_map.items() if where == name}, folder / name)
    write_index(folder / f"{stem}.safetensors.index.json", weight_map)
    return names


def write_index(path: Path, weight_map: Mapping[str, str]) -> None:
    overwrite(path, json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}).encode())
