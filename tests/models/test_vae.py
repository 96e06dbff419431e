"""Autoencoders: the same numbers as diffusers gives, nothing missing, nothing said."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.utils import logging as library_log
from torch import Tensor

from kdit.errors import CheckpointError
from kdit.models.vae import load_vae
from tests.models.checkpoint_files import NETWORK_FILE, clone, edit_json, edit_tensors, shard


@pytest.fixture
def folder(reference_family: Callable[[str], Path], tmp_path: Path) -> Path:
    return clone(reference_family("flux_dev") / "model" / "vae", tmp_path / "vae")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return load_vae(folder, dtype=dtype, device="cpu")


def test_equals_the_library(folder: Path) -> None:
    vae, expected = load(folder), diffusers.AutoencoderKL.from_pretrained(folder).eval()
    assert isinstance(vae, diffusers.AutoencoderKL)
    latents = torch.randn(1, vae.config.latent_channels, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(vae.decode(latents).sample, expected.decode(latents).sample)
    assert not vae.training and not any(p.requires_grad for p in vae.parameters())


def test_video_autoencoder(reference_family: Callable[[str], Path]) -> None:
    vae = load(reference_family("wan22_t2v_a14b") / "model" / "vae")
    assert isinstance(vae, diffusers.AutoencoderKLWan)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtype(folder: Path, dtype: torch.dtype) -> None:
    assert {p.dtype for p in load(folder, dtype).parameters()} == {dtype}


def test_shards_equal_one_file(folder: Path) -> None:
    whole = load(folder).state_dict()
    shard(folder)
    sharded = load(folder).state_dict()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


@pytest.mark.parametrize("device", ["cpu", "meta"])  # the latter stands for a device to move to
def test_weights_are_plain_tensors_inside_inference_mode(folder: Path, device: str) -> None:
    with torch.inference_mode():
        vae = load_vae(folder, dtype=torch.float32, device=device)
    assert {p.device.type for p in vae.parameters()} == {device}
    assert not any(p.is_inference() for p in vae.parameters())


def remove(tensors: dict[str, Tensor]) -> None:
    del tensors["decoder.conv_in.bias"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (remove, r"1 tensors are missing: decoder\.conv_in\.bias"),
        (lambda t: t.update(ghost=torch.ones(1)), r"1 tensors have no place in AutoencoderKL: ghost"),
        (lambda t: t.update({"decoder.conv_in.bias": torch.ones(2)}), r"decoder\.conv_in\.bias expected shape .*\[2\]"),
    ],
)
def test_tensors_that_do_not_fit(
    folder: Path, change: Callable[[dict[str, Tensor]], None], expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    edit_tensors(folder / NETWORK_FILE, change)
    with pytest.raises(CheckpointError, match=rf"component vae: .*{expected}"):
        load(folder)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("class_name", ["SomeoneElsesVAE", "FluxPipeline", "__version__"])
def test_classes_that_cannot_be_had(folder: Path, class_name: str) -> None:
    edit_json(folder / "config.json", _class_name=class_name)
    with pytest.raises(
        CheckpointError, match=rf"config\.json names the class '{class_name}'; diffusers .* has no such"
    ):
        load(folder)


def test_config_that_the_library_refuses(folder: Path) -> None:
    edit_json(folder / "config.json", norm_num_groups=7)
    with pytest.raises(CheckpointError, match=rf"component vae: AutoencoderKL cannot load {folder}: "):
        load(folder)


def test_loading_changes_no_setting(folder: Path) -> None:
    verbosity, bars, filters = (
        library_log.get_verbosity(),
        library_log.is_progress_bar_enabled(),
        list(warnings.filters),
    )
    load(folder)
    after = library_log.get_verbosity(), library_log.is_progress_bar_enabled(), list(warnings.filters)
    assert after == (verbosity, bars, filters)
