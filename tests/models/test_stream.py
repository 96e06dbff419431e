"""Modulation weights that are in memory only while a request is prepared."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from kdit.errors import CheckpointError
from kdit.models.network import Network
from kdit.models.prepare import prepare_mod
from kdit.models.rows import Cond
from kdit.models.weights.component_folder import ComponentFolder
from kdit.models.weights.loading import load_network
from kdit.ops.opset import OpSet
from tests.models.checkpoint_files import NETWORK_FILE, clone

TIMES = torch.tensor([1.0, 0.6, 0.2])
Load = Callable[..., Network]


@pytest.fixture(params=["flux_dev", "sd35_medium"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    reference: Callable[[str], Path] = request.getfixturevalue("reference_family")
    return clone(reference(request.param) / "model" / "transformer", tmp_path / "transformer")


def load(folder: Path, *, streamed: bool, batch_invariant: bool = False, dtype: torch.dtype = torch.float32) -> Network:
    ops = OpSet(batch_invariant=batch_invariant)
    return load_network(ComponentFolder.at(folder), dtype=dtype, device="cpu", ops=ops, streamed=streamed)


def cond(net: Network) -> Cond:
    config = net.params
    pooled = getattr(config, "pooled_dim", None) or config.pooled_projection_dim  # type: ignore[union-attr]
    g = torch.Generator().manual_seed(0)
    return {
        "pooled": torch.randn(2, pooled, generator=g).to(net.dtype),
        "guidance": torch.tensor([3.0, 2.0]),
        "txt": torch.zeros(2, 1, 1),
    }


def resident(net: nn.Module) -> int:
    return sum(p.nbytes for p in net.parameters() if not p.is_meta)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_streamed_weights_give_the_same_tables_bit_for_bit(
    folder: Path, dtype: torch.dtype, batch_invariant: bool
) -> None:
    whole, streamed = (load(folder, streamed=s, dtype=dtype, batch_invariant=batch_invariant) for s in (False, True))
    before = resident(streamed)
    assert before < 0.8 * resident(whole)
    for _ in range(2):  # for every request anew
        tables = [prepare_mod(net, TIMES.to(dtype), cond(net)).rows for net in (whole, streamed)]
        assert all(torch.equal(a, b) for a, b in zip(*tables, strict=True))
        assert resident(streamed) == before


@torch.inference_mode()
def test_one_layer_at_a_time_is_in_memory(folder: Path) -> None:
    net = load(folder, streamed=True)
    before, most = resident(net), 0

    def watch(_module: nn.Module, _args: object, _out: object) -> None:
        nonlocal most
        most = max(most, resident(net) - before)

    layers = [m for m in net.modules() if any(True for _ in m.parameters(recurse=False))]
    largest = max(sum(p.nbytes for p in m.parameters(recurse=False)) for m in layers)
    for layer in layers:
        layer.register_forward_hook(watch, prepend=True)
    prepare_mod(net, TIMES, cond(net))
    assert 0 < most <= largest


@torch.inference_mode()
def test_a_failed_preparation_leaves_nothing_in_memory(folder: Path) -> None:
    net = load(folder, streamed=True, batch_invariant=True)
    before = resident(net)
    broken = {**cond(net), "pooled": torch.zeros(2, 3)}
    with pytest.raises(RuntimeError):
        prepare_mod(net, TIMES, broken)
    assert resident(net) == before


@torch.inference_mode()
def test_a_file_that_changed_since_is_refused(folder: Path) -> None:
    net, file = load(folder, streamed=True), folder / NETWORK_FILE
    os.utime(file, ns=(1, 1))
    with pytest.raises(CheckpointError, match="changed since the model was loaded"):
        prepare_mod(net, TIMES, cond(net))
    file.unlink()
    with pytest.raises(CheckpointError, match="changed since the model was loaded"):
        prepare_mod(net, TIMES, cond(net))
