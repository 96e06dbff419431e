"""fp8 weights and their scales, in single files and in folders: W = stored * scale, or an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kdit.errors import CheckpointError
from kdit.models.checkpoint import Checkpoint
from kdit.models.text_encoder import load_text_encoder
from kdit.models.vae import load_vae
from tests.models.checkpoint_files import clone, edit_tensors, shard
from tests.models.single_file import original_layout
from tests.models.single_file.files import WEIGHTS, equal, loaded, network_tensors, write

Family = Callable[[str], Path]
LAYER = "transformer_blocks.0.attn.to_out.0"
FUSED = "double_blocks.0.img_attn.qkv"  # in the authors' layout: to_q, to_k, to_v
SCALE = torch.tensor(0.0013)


def fp8(tensors: dict[str, Tensor], layer: str, spelling: str, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Store a layer's weight divided by ``scale``; the weight that it stands for."""
    per_row = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(-1)[:1] if scale.numel() else torch.ones(1)
    stored = (tensors[f"{layer}.weight"] / per_row).to(dtype)
    tensors[f"{layer}.weight"], tensors[f"{layer}.{spelling}"] = stored, scale.clone()
    return stored.float() * per_row


def scales(rows: int) -> list[Tensor]:
    per_row = torch.linspace(0.001, 0.01, rows)
    return [SCALE, SCALE.reshape(1), torch.ones(0), per_row, per_row.reshape(-1, 1)]


@pytest.fixture
def model(reference_family: Family) -> Path:
    return reference_family("flux_dev") / "model"


@pytest.mark.parametrize(
    ("spelling", "dtype"), [("scale_weight", torch.float8_e4m3fn), ("weight_scale", torch.float8_e5m2)]
)
@pytest.mark.parametrize("form", range(5))
def test_a_scale_counts_in_a_file(spelling: str, dtype: torch.dtype, form: int, model: Path, tmp_path: Path) -> None:
    tensors = network_tensors(model)
    plain = dict(tensors)
    plain[f"{LAYER}.weight"] = fp8(tensors, LAYER, spelling, scales(len(tensors[f"{LAYER}.weight"]))[form], dtype)
    tensors |= {"scaled_fp8": torch.ones(2, dtype=dtype), f"{LAYER}.input_scale": torch.ones(())}
    found = Checkpoint.open(write(tmp_path / "x.safetensors", tensors, "model.diffusion_model."), model)
    expected = Checkpoint.open(write(tmp_path / "plain.safetensors", plain), model)
    for wanted in (torch.float32, torch.bfloat16):
        assert equal(loaded(found, dtype=wanted), loaded(expected, dtype=wanted))
    assert not equal(loaded(found), loaded(Checkpoint.open(model)))


@pytest.mark.parametrize("form", [0, 3])
def test_a_fused_weight_is_split_with_its_scale(form: int, model: Path, tmp_path: Path) -> None:
    stored = original_layout.flux(network_tensors(model))
    plain = dict(stored)
    scale = scales(len(stored[f"{FUSED}.weight"]))[form]
    plain[f"{FUSED}.weight"] = fp8(stored, FUSED, "scale_weight", scale, torch.float8_e4m3fn)
    stored[f"{FUSED}.scale_input"] = torch.ones(1)
    head = "final_layer.adaLN_modulation.1"  # whose halves change places
    plain[f"{head}.weight"] = fp8(
        stored, head, "weight_scale", scales(len(stored[f"{head}.weight"]))[form], torch.float8_e5m2
    )
    found = Checkpoint.open(write(tmp_path / "x.safetensors", stored), model)
    expected = Checkpoint.open(write(tmp_path / "plain.safetensors", plain), model)
    assert equal(loaded(found), loaded(expected))


@pytest.mark.parametrize("stated", [b'{"format": "float8_e4m3fn"}', b'{"format": "nvfp4"}', b"[]", b"?"])
def test_a_stated_format(stated: bytes, model: Path, tmp_path: Path) -> None:
    tensors = network_tensors(model)
    plain = dict(tensors)
    plain[f"{LAYER}.weight"] = fp8(tensors, LAYER, "weight_scale", SCALE, torch.float8_e4m3fn)
    tensors[f"{LAYER}.comfy_quant"] = torch.tensor(list(stated), dtype=torch.uint8)
    path = write(tmp_path / "x.safetensors", tensors)
    if b"float8" in stated:
        expected = Checkpoint.open(write(tmp_path / "plain.safetensors", plain), model)
        assert equal(loaded(Checkpoint.open(path, model)), loaded(expected))
    else:
        with pytest.raises(CheckpointError, match=r"comfy_quant states the format .*; kdit reads float8_e4m3fn"):
            Checkpoint.open(path, model)


def test_fp8_without_scales_is_only_cast(model: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in network_tensors(model).items()}
    found = Checkpoint.open(write(tmp_path / "x.safetensors", tensors), model)
    plain = write(tmp_path / "plain.safetensors", {name: tensor.float() for name, tensor in tensors.items()})
    assert equal(loaded(found), loaded(Checkpoint.open(plain, model)))


@pytest.mark.parametrize("num_shards", [1, 5])
def test_scales_in_a_folder(num_shards: int, model: Path, tmp_path: Path) -> None:
    """A weight and its scale may be in different shards."""
    folder, expected = clone(model, tmp_path / "fp8"), clone(model, tmp_path / "plain")
    weights: dict[str, Tensor] = {}

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".weight") and tensors[name].dim() == 2]:
            layer = name.removesuffix(".weight")
            weights[name] = fp8(tensors, layer, "scale_weight", SCALE * (1 + len(weights)), torch.float8_e4m3fn)

    edit_tensors(folder / "transformer" / WEIGHTS, quantise)
    edit_tensors(expected / "transformer" / WEIGHTS, lambda tensors: tensors.update(weights))
    if num_shards > 1:
        shard(folder / "transformer", num_shards=num_shards)
    checkpoint = Checkpoint.open(folder)
    assert not checkpoint.faults()
    assert equal(loaded(checkpoint), loaded(Checkpoint.open(expected)))


@pytest.mark.parametrize("component", ["text_encoder", "text_encoder_2", "vae"])
def test_scales_of_library_models(component: str, model: Path, tmp_path: Path) -> None:
    folder, expected = clone(model, tmp_path / "fp8"), clone(model, tmp_path / "plain")
    name = WEIGHTS if component == "vae" else "model.safetensors"
    layer = {
        "text_encoder": "encoder.layers.1.mlp.fc1",
        "text_encoder_2": "encoder.block.1.layer.1.DenseReluDense.wi_0",
        "vae": "decoder.mid_block.attentions.0.to_q",
    }[component]
    stored = load_file(folder / component / name)
    if f"{layer}.weight" not in stored:
        layer = f"text_model.{layer}"
    plain = dict(stored)
    plain[f"{layer}.weight"] = fp8(stored, layer, "scale_weight", SCALE, torch.float8_e4m3fn)
    for where, tensors in ((folder, stored), (expected, plain)):
        (where / component / name).unlink()
        save_file(tensors, where / component / name)

    def state(where: Path) -> dict[str, Tensor]:
        if component == "vae":
            return load_vae(where / component, dtype=torch.float32, device="cpu").state_dict()
        tokenizer = where / component.replace("text_encoder", "tokenizer")
        return load_text_encoder(where / component, tokenizer, dtype=torch.float32, device="cpu").model.state_dict()

    assert equal(state(folder), state(expected))
    assert not equal(state(folder), state(model))


def fault(model: Path, path: Path, extra: dict[str, Tensor], drop: str = "") -> str:
    tensors = {name: tensor for name, tensor in network_tensors(model).items() if name != drop}
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(write(path, tensors | extra), model)
    return str(error.value)


@pytest.mark.parametrize("spelling", ["scale_weight", "weight_scale", "scale_input", "input_scale"])
def test_a_scale_of_nothing_is_refused(spelling: str, model: Path, tmp_path: Path) -> None:
    message = fault(model, tmp_path / "x.safetensors", {f"lost.layer.{spelling}": SCALE})
    assert f"lost.layer.{spelling} is the scale of no tensor: no lost.layer.weight" in message
    assert str(tmp_path / "x.safetensors") in message


def test_scales_that_do_not_fit_are_refused(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    rows = len(network_tensors(model)[f"{LAYER}.weight"])
    blocks = {f"{LAYER}.weight_scale": torch.ones(rows, 2)}
    assert f"has the shape [{rows}, 2], expected one number or one per row" in fault(model, path, blocks)
    assert "has the shape [3], expected" in fault(model, path, {f"{LAYER}.weight_scale": torch.ones(3)})
    twice = {f"{LAYER}.weight_scale": SCALE.clone(), f"{LAYER}.scale_weight": SCALE}
    assert "has two scales" in fault(model, path, twice)
    integer = {f"{LAYER}.weight_scale": torch.ones((), dtype=torch.int32)}
    assert f"{LAYER}.weight_scale (I32) scales {LAYER}.weight (F32)" in fault(model, path, integer)
    whole = {f"{LAYER}.weight": torch.ones(rows, rows, dtype=torch.int8), f"{LAYER}.weight_scale": SCALE}
    assert f"scales {LAYER}.weight (I8)" in fault(model, path, whole)


def test_faults_of_scales_in_a_folder_are_listed(model: Path, tmp_path: Path) -> None:
    folder = clone(model, tmp_path / "model")
    edit_tensors(folder / "transformer" / WEIGHTS, lambda tensors: tensors.update({"lost.weight_scale": SCALE}))
    (found,) = Checkpoint.open(folder).faults()
    assert "lost.weight_scale is the scale of no tensor" in str(found)
