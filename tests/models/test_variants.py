"""Variants of weight files: which set is loaded, for networks of ours and for the libraries' models alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from kdit.config import ExecuteConfig
from kdit.errors import CheckpointError, CheckpointMissingError
from kdit.models.text_encoder import load_text_encoder
from kdit.models.vae import load_vae
from kdit.models.weights.component_folder import ComponentFolder
from kdit.models.weights.loading import load_network
from kdit.models.weights.variants import weight_sets
from kdit.ops.opset import OpSet
from kdit.pipelines.pipeline import Pipeline
from tests.models.checkpoint_files import clone, overwrite, shard, with_header

STEMS = {"transformer": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "text_encoder_2": "model"}


@pytest.fixture
def folder(reference_family: Callable[[str], Path], tmp_path: Path) -> Path:
    return clone(reference_family("flux_dev") / "model", tmp_path / "model")


def load(folder: Path, name: str, variant: str | None = None) -> dict[str, torch.Tensor]:
    component = ComponentFolder.at(folder / name, variant=variant)
    model: nn.Module
    if name == "transformer":
        model = load_network(component, dtype=torch.float32, device="cpu", ops=OpSet())
    elif name == "vae":
        model = load_vae(component, dtype=torch.float32, device="cpu")
    else:
        model = load_text_encoder(component, folder / "tokenizer_2", dtype=torch.float32, device="cpu").model
    return model.state_dict()


def add_variant(folder: Path, name: str, variant: str) -> None:
    """The weights of a component in half precision, as the libraries write a variant."""
    stem = STEMS[name]
    half = {key: tensor.half() for key, tensor in load_file(folder / name / f"{stem}.safetensors").items()}
    save_file(half, folder / name / f"{stem}.{variant}.safetensors")


def is_half(state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, tensor.half().float()) for tensor in state.values() if tensor.is_floating_point())


@pytest.mark.parametrize("name", STEMS)
def test_a_variant_alone_is_loaded_and_told(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    whole = load(folder, name)
    assert not is_half(whole) and not caplog.text
    add_variant(folder, name, "fp16")
    (folder / name / f"{STEMS[name]}.safetensors").unlink()
    alone = load(folder, name)
    assert is_half(alone) and all(torch.equal(alone[key], whole[key].half().float()) for key in whole)
    assert f"component {name}: {folder / name} holds only the variant 'fp16', which is loaded" in caplog.text


@pytest.mark.parametrize("name", STEMS)
def test_the_plain_set_counts_unless_a_variant_is_asked_for(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    add_variant(folder, name, "fp16")
    assert not is_half(load(folder, name))
    assert is_half(load(folder, name, "fp16")) and not caplog.text
    assert not is_half(load(folder, name, "bf16"))
    assert "has no variant 'bf16'; its plain weights are loaded" in caplog.text


@pytest.mark.parametrize("name", STEMS)
def test_a_sharded_variant(folder: Path, name: str) -> None:
    add_variant(folder, name, "fp16")
    shards = shard(folder / name, f"{STEMS[name]}.fp16")
    index = folder / name / f"{STEMS[name]}.fp16.safetensors.index.json"
    index.rename(folder / name / f"{STEMS[name]}.safetensors.index.fp16.json")
    assert is_half(load(folder, name, "fp16")) and not is_half(load(folder, name))
    (folder / name / f"{STEMS[name]}.safetensors").unlink()
    assert is_half(load(folder, name))
    (folder / name / shards[1]).unlink()
    with pytest.raises(CheckpointMissingError, match=rf"1 of 3 shards .* are missing: {shards[1]}"):
        load(folder, name)


def test_the_older_spelling_of_an_index(folder: Path) -> None:
    add_variant(folder, "vae", "fp16")
    shard(folder / "vae", "diffusion_pytorch_model.fp16")
    index = folder / "vae" / "diffusion_pytorch_model.fp16.safetensors.index.json"
    index.rename(folder / "vae" / "diffusion_pytorch_model.safetensors.fp16.index.json")
    assert is_half(load(folder, "vae", "fp16"))


def test_several_variants_and_nothing_plain(folder: Path) -> None:
    for variant in ("fp16", "bf16"):
        add_variant(folder, "vae", variant)
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"only the variants bf16, fp16; choose one of them with variant="):
        load(folder, "vae")
    with pytest.raises(CheckpointError, match=r"only the variants bf16, fp16 and not 'ema', which was asked for"):
        load(folder, "vae", "ema")
    assert is_half(load(folder, "vae", "fp16"))


def test_another_variant_than_the_one_asked_for(folder: Path) -> None:
    add_variant(folder, "vae", "fp16")
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(CheckpointMissingError, match="holds only the variant 'fp16', not 'bf16'"):
        load(folder, "vae", "bf16")


def test_a_damaged_variant_is_no_concern_of_the_plain_set(folder: Path) -> None:
    overwrite(folder / "vae" / "diffusion_pytorch_model.fp16.safetensors", with_header(b"{"))
    load(folder, "vae")
    with pytest.raises(CheckpointError, match=r"fp16\.safetensors: the safetensors header is damaged"):
        load(folder, "vae", "fp16")


def test_names_are_sorted_into_sets() -> None:
    sets = weight_sets(
        [
            "model.safetensors", "model-00001-of-00002.safetensors", "model.fp16.safetensors",
            "model.non_ema-00001-of-00002.safetensors", "model.safetensors.index.non_ema.json", "other.safetensors",
            "model.safetensors.index.json", "model.bin", "model.v-2.safetensors",
        ],
        "model",
    )  # fmt: skip
    assert set(sets) == {None, "fp16", "non_ema", "v-2"}
    assert (sets[None].single, sets[None].index) == ("model.safetensors", "model.safetensors.index.json")
    assert sets[None].shards == {"model-00001-of-00002.safetensors"}
    assert sets["non_ema"].shards == {"model.non_ema-00001-of-00002.safetensors"} and sets["non_ema"].usable
    assert sets["fp16"].single == "model.fp16.safetensors"


def test_a_pipeline_takes_the_variant_where_a_component_has_it(folder: Path) -> None:
    add_variant(folder, "transformer", "fp16")
    checkpoint = Pipeline.open(folder, execute_config=ExecuteConfig(variant="fp16")).checkpoint
    taken = {name: checkpoint.component(name).open_weights().variant for name in ("transformer", "vae", "text_encoder")}
    assert taken == {"transformer": "fp16", "vae": None, "text_encoder": None}
    assert Pipeline.open(folder).checkpoint.component("transformer").open_weights().variant is None
    with pytest.raises(CheckpointError, match="no component has weight files of the variant 'int4'"):
        Pipeline.open(folder, execute_config=ExecuteConfig(variant="int4"))
