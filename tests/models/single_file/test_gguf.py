"""GGUF: plain numbers exactly, quantised ones as the package decodes them, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Coding
from gguf.quants import dequantize, quantize
from torch import Tensor

from kdit.errors import CheckpointError
from kdit.models.checkpoint import Checkpoint
from kdit.models.single_file import gguf_file
from kdit.models.single_file.gguf_file import read_gguf
from kdit.models.weights.tensor_reader import TensorReader
from tests.models.single_file import original_layout
from tests.models.single_file.files import equal, loaded, network_tensors, write

Family = Callable[[str], Path]


@pytest.fixture
def model(reference_family: Family) -> Path:
    return reference_family("flux_dev") / "model"


def write_gguf(path: Path, tensors: dict[str, Tensor | tuple[np.ndarray, Coding]], **shapes: tuple[int, ...]) -> Path:
    writer = gguf.GGUFWriter(path, "flux")
    for name, shape in shapes.items():
        writer.add_array(f"comfy.gguf.orig_shape.{name}.weight", list(shape))
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        elif tensor.dtype is torch.bfloat16:
            writer.add_tensor(name, tensor.contiguous().view(torch.uint8).numpy(), raw_dtype=Coding.BF16)
        else:
            writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_all(path: Path) -> dict[str, Tensor]:
    with TensorReader() as reader:
        return {name: reader.read(info) for name, info in read_gguf(path).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_plain_numbers_are_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    shapes = {"norm": (7,), "matrix": (5, 6), "conv": (3, 4, 2, 2), "one": (1,)}
    tensors = {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}
    found = read_all(write_gguf(tmp_path / "x.gguf", dict(tensors)))
    assert equal(found, tensors)
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(shapes, dtype)


def test_a_whole_network_in_plain_numbers(model: Path, tmp_path: Path) -> None:
    """One in BF16, norms too, beside its F32 twin; fused tensors are cut, halves change places."""
    tensors = original_layout.flux(network_tensors(model))
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    found = loaded(Checkpoint.open(write_gguf(tmp_path / "x.gguf", dict(rounded)), model))
    expected = loaded(Checkpoint.open(write(tmp_path / "x.safetensors", rounded), model))
    assert equal(found, expected)
    twin = loaded(Checkpoint.open(write_gguf(tmp_path / "y.gguf", dict(tensors)), model))
    assert equal(twin, loaded(Checkpoint.open(model)))
    assert all(torch.allclose(found[name], twin[name], rtol=2**-8, atol=0) for name in found)


@pytest.mark.parametrize("coding", [Coding.Q8_0, Coding.Q4_0, Coding.Q5_1])
def test_quantised_numbers_are_what_the_package_decodes(
    coding: Coding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "_CHUNK_ELEMENTS", 96)  # so that several parts are decoded
    values = np.random.default_rng(0).standard_normal((12, 64), dtype=np.float32)
    coded = quantize(values, coding)
    path = write_gguf(tmp_path / "x.gguf", {"x": (coded, coding)})
    expected = torch.from_numpy(dequantize(coded, coding))
    assert read_gguf(path)["x"].dtype == coding.name and read_gguf(path)["x"].shape == (12, 64)
    assert torch.equal(read_all(path)["x"], expected)
    assert (expected - torch.from_numpy(values)).abs().max() < 0.5


def test_coded_k_quants_are_decoded(tmp_path: Path) -> None:
    """The package cannot write these; any bytes are a valid block."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[Coding.Q4_K]
    coded = np.random.default_rng(0).integers(0, 60, (3, 2 * block_bytes), dtype=np.uint8)
    found = read_all(write_gguf(tmp_path / "x.gguf", {"x": (coded, Coding.Q4_K)}))["x"]
    assert found.shape == (3, 2 * block)
    assert torch.equal(found, torch.from_numpy(dequantize(coded, Coding.Q4_K)))


def test_a_fused_quantised_weight_is_cut_by_rows(tmp_path: Path) -> None:
    from kdit.models.single_file.name_rule import layer, rename

    values = np.random.default_rng(0).standard_normal((12, 32), dtype=np.float32)
    coded = quantize(values, Coding.Q8_0)
    path = write_gguf(tmp_path / "x.gguf", {"qkv.weight": (coded, Coding.Q8_0), "mod.weight": (coded, Coding.Q8_0)})
    rules = (*layer("qkv", "q", "k", "mlp", parts=(1, 1, 4)), *layer("mod", "mod", change="swap_halves"))
    named = rename(read_gguf(path), rules)
    whole = torch.from_numpy(dequantize(coded, Coding.Q8_0))
    with TensorReader() as reader:
        found = {name: reader.read(info) for name, info in named.items()}
    assert torch.equal(found["q.weight"], whole[:2]) and torch.equal(found["k.weight"], whole[2:4])
    assert torch.equal(found["mlp.weight"], whole[4:])
    assert torch.equal(found["mod.weight"], torch.cat((whole[6:], whole[:6])))


def test_a_fifth_dimension_is_noted_beside_the_tensor(reference_family: Family, tmp_path: Path) -> None:
    model = reference_family("wan21_t2v") / "model"
    tensors = original_layout.wan(network_tensors(model))
    weight = tensors["patch_embedding.weight"]
    assert weight.dim() == 5
    flat = {**tensors, "patch_embedding.weight": weight.flatten(1)}
    path = write_gguf(tmp_path / "x.gguf", dict(flat), patch_embedding=tuple(weight.shape))
    assert equal(loaded(Checkpoint.open(path, model)), loaded(Checkpoint.open(model)))


def test_a_coding_that_the_package_lacks(tmp_path: Path) -> None:
    _, block_bytes = gguf.GGML_QUANT_SIZES[Coding.Q8_1]
    path = write_gguf(tmp_path / "x.gguf", {"x": (np.zeros((2, block_bytes), np.uint8), Coding.Q8_1)})
    with pytest.raises(CheckpointError, match=r"x\.gguf holds 1 tensors in Q8_1, such as x, which gguf cannot decode"):
        read_gguf(path)


def test_integers_are_no_weights(model: Path, tmp_path: Path) -> None:
    tensors = original_layout.flux(network_tensors(model))
    tensors["img_in.bias"] = tensors["img_in.bias"].to(torch.int32)
    with pytest.raises(CheckpointError, match="I32"):
        loaded(Checkpoint.open(write_gguf(tmp_path / "x.gguf", dict(tensors)), model))


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_truncated_file(share: float, model: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", dict(original_layout.flux(network_tensors(model))))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"x\.gguf is .*truncated"):
        Checkpoint.open(path, model)


def test_without_the_package(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "x.gguf", dict(original_layout.flux(network_tensors(model))))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"reading it needs the package gguf: pip install 'kdit\[gguf\]'"):
        Checkpoint.open(path, model)


def test_the_hash_of_a_large_file_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF file does not begin with the length of a header."""
    from kdit.models import weight_hash as module

    monkeypatch.setattr(module, "WHOLE_FILE_LIMIT", 1 << 10)
    monkeypatch.setattr(module, "MEBIBYTE", 1 << 6)
    path = write_gguf(tmp_path / "x.gguf", {"x": torch.zeros(1 << 16)})
    data = path.read_bytes()
    first = module.weight_hash([("x", path)])
    path.write_bytes(data[: 1 << 12] + b"\1" + data[(1 << 12) + 1 :])  # between two blocks
    assert module.weight_hash([("x", path)]) == first
    path.write_bytes(data[:-1] + b"\1")
    assert module.weight_hash([("x", path)]) != first
