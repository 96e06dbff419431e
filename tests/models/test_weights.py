"""Weights of our networks: which tensor goes where, in which dtype, with how much memory, and what is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kdit.errors import CheckpointError
from kdit.models.network import Network
from kdit.models.weight_rule import WeightRule, fused, plain
from kdit.models.weights import loading
from kdit.models.weights.component_folder import ComponentFolder
from kdit.models.weights.loading import load_network
from kdit.models.weights.plan import plan_weights
from kdit.models.weights.weight_files import open_weights
from kdit.ops.opset import OpSet
from tests.models.checkpoint_files import NETWORK_FILE, clone, edit_json, edit_tensors, shard

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class ToyNetwork(Network):
    """Two blocks with a fused projection, one that joins along its inputs, a scalar, and an optional layer."""

    rules = (
        *fused("blocks.{}.qkv", tuple(f"layers.{{}}.to_{n}" for n in "qkv"), parts=(1, 1, 2)),
        WeightRule("blocks.{}.out.weight", ("layers.{}.out_a.weight", "layers.{}.out_b.weight"), "row", (1, 2)),
        WeightRule("blocks.{}.out.bias", ("layers.{}.out.bias",), "row"),
        *plain("extra", "extra"),
        WeightRule("scale", ("scale",)),
    )

    def __init__(self, extra: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList(nn.ModuleDict({"qkv": nn.Linear(3, 8), "out": nn.Linear(6, 5)}) for _ in range(2))
        self.extra = nn.Linear(2, 2) if extra else None

    @classmethod
    def from_config(cls, config: Mapping[str, object], *, ops: OpSet) -> Self:
        return cls(bool(config.get("extra")))


def toy_tensors(seed: int = 0) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"scale": ()}
    for i in range(2):
        for name, rows in (("to_q", 2), ("to_k", 2), ("to_v", 4)):
            shapes[f"layers.{i}.{name}.weight"], shapes[f"layers.{i}.{name}.bias"] = (rows, 3), (rows,)
        shapes[f"layers.{i}.out_a.weight"], shapes[f"layers.{i}.out_b.weight"] = (5, 2), (5, 4)
        shapes[f"layers.{i}.out.bias"] = (5,)
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ComponentFolder:
    (tmp_path / "config.json").write_text('{"_class_name": "Toy"}')
    save_file(toy_tensors(), tmp_path / NETWORK_FILE)
    monkeypatch.setattr(loading, "network_class", lambda name, where: ToyNetwork)
    return ComponentFolder.at(tmp_path)


@pytest.fixture
def flux(reference_family: Callable[[str], Path], tmp_path: Path) -> ComponentFolder:
    return ComponentFolder.at(clone(reference_family("flux_dev") / "model" / "transformer", tmp_path / "transformer"))


def load(component: ComponentFolder, dtype: torch.dtype = torch.float32) -> Network:
    return load_network(component, dtype=dtype, device="cpu", ops=OpSet())


def test_sources_join_where_the_rules_say(toy: ComponentFolder) -> None:
    net, given = load(toy), toy_tensors()
    state = net.state_dict()
    for i in range(2):
        for leaf in ("weight", "bias"):
            expected = torch.cat([given[f"layers.{i}.to_{n}.{leaf}"] for n in "qkv"])
            assert torch.equal(state[f"blocks.{i}.qkv.{leaf}"], expected)
        joined = torch.cat([given[f"layers.{i}.out_a.weight"], given[f"layers.{i}.out_b.weight"]], dim=1)
        assert torch.equal(state[f"blocks.{i}.out.weight"], joined)
        assert torch.equal(state[f"blocks.{i}.out.bias"], given[f"layers.{i}.out.bias"])
    assert torch.equal(state["scale"], given["scale"])
    assert len(state) == 9


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES[1:])
def test_any_float_dtype_is_cast_on_copy(toy: ComponentFolder, stored: torch.dtype, wanted: torch.dtype) -> None:
    save_file({name: tensor.to(stored) for name, tensor in toy_tensors().items()}, toy.path / NETWORK_FILE)
    net = load(toy, wanted)
    for i in range(2):
        expected = torch.cat([toy_tensors()[f"layers.{i}.to_{n}.weight"].to(stored) for n in "qkv"]).to(wanted)
        assert torch.equal(net.state_dict()[f"blocks.{i}.qkv.weight"], expected)
    assert {parameter.dtype for parameter in net.parameters()} == {wanted}


def test_parameters_that_stay_in_float32(toy: ComponentFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyNetwork, "float32", ("scale", "blocks.{}.qkv", "blocks.{}.out.bias", "blocks.1.o"))
    net = load(toy, torch.bfloat16)
    kept = {name for name, parameter in net.named_parameters() if parameter.dtype is torch.float32}
    assert kept == {"scale"} | {
        f"blocks.{i}.{name}" for i in range(2) for name in ("qkv.weight", "qkv.bias", "out.bias")
    }
    assert torch.equal(net.state_dict()["blocks.1.out.bias"], toy_tensors()["layers.1.out.bias"])
    assert net.state_dict()["blocks.1.out.weight"].dtype is torch.bfloat16


def test_ignored_tensors_have_no_place_and_need_none(toy: ComponentFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {f"layers.{name}.unread": torch.ones(2) for name in ("0", "11", "x")}
    edit_tensors(toy.path / NETWORK_FILE, lambda tensors: tensors.update(more))
    monkeypatch.setattr(ToyNetwork, "ignored", ("layers.{}.unread",))
    assert "1 tensors have no place in ToyNetwork: layers.x.unread" in refusal(toy, monkeypatch)


def test_only_wan_leaves_norm_added_q_unread(flux: ComponentFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "blocks.0.attn2.norm_added_q.weight"
    edit_tensors(flux.path / NETWORK_FILE, lambda tensors: tensors.update({name: torch.ones(2)}))
    assert f"1 tensors have no place in FluxNetwork: {name}" in refusal(flux, monkeypatch)


def test_metadata_is_optional(toy: ComponentFolder) -> None:
    with safe_open(toy.path / NETWORK_FILE, "pt") as file:
        assert not file.metadata()
    load(toy)
    save_file(toy_tensors(), toy.path / NETWORK_FILE, metadata={"format": "pt"})
    load(toy)


def test_shards_equal_one_file(flux: ComponentFolder) -> None:
    whole = load(flux).state_dict()
    shard(flux.path, num_shards=4)
    sharded = load(flux).state_dict()
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_a_loaded_network_is_ready_to_run(toy: ComponentFolder) -> None:
    with torch.inference_mode():  # as the executor calls it
        net = load(toy)
    assert not net.training
    assert not any(p.requires_grad or p.is_inference() or p.is_meta for p in net.parameters())
    assert all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in net.parameters())


class Allocations(TorchDispatchMode):
    """Follows the bytes of all tensors that operators allocate; views and mapped files are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {a.untyped_storage()._cdata for a in args if isinstance(a, Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not out.is_meta and out.untyped_storage()._cdata not in inputs:
            storage = out.untyped_storage()
            if storage.filename is None and storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata, None)
                self.peak = max(self.peak, sum(self.live.values()))
        return out


def refusal(component: ComponentFolder, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message of the refusal; fails if anything was allocated or a file opened for its tensors before it."""

    def forbidden(*args: Any, **options: Any) -> None:
        pytest.fail("weights were read before everything was checked")

    monkeypatch.setattr(loading, "load_tensors", forbidden)
    with Allocations() as allocations, pytest.raises(CheckpointError) as error:
        load(component)
    assert allocations.peak == 0
    return str(error.value)


def test_missing_and_left_over_tensors_are_named(toy: ComponentFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        tensors["layers.0.to_query.weight"] = tensors.pop("layers.0.to_q.weight")

    edit_tensors(toy.path / NETWORK_FILE, rename)
    message = refusal(toy, monkeypatch)
    assert str(toy.path) in message
    assert "1 of 19 tensors are missing: layers.0.to_q.weight" in message
    assert "1 tensors have no place in ToyNetwork: layers.0.to_query.weight" in message


def test_a_tensor_of_an_optional_layer_needs_the_layer(toy: ComponentFolder) -> None:
    edit_tensors(
        toy.path / NETWORK_FILE, lambda t: t.update({"extra.weight": torch.ones(2, 2), "extra.bias": torch.ones(2)})
    )
    with pytest.raises(CheckpointError, match=r"2 tensors have no place in ToyNetwork: extra\.bias, extra\.weight"):
        load(toy)
    edit_json(toy.path / "config.json", extra=True)
    assert torch.equal(load(ComponentFolder.at(toy.path)).state_dict()["extra.weight"], torch.ones(2, 2))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("scale", (1,), "scale has the shape [1], expected []"),
        ("layers.1.out.bias", (6,), "layers.1.out.bias has the shape [6], expected [5]"),
        ("layers.0.to_k.weight", (3, 3), "[2, 3] + [3, 3] + [4, 3], expected [8, 3] when joined along dim 0"),
        ("layers.0.to_k.weight", (2, 2), "[2, 3] + [2, 2] + [4, 3], expected [8, 3] when joined along dim 0"),
        ("layers.0.to_k.bias", (), "[2] + [] + [4], expected [8]"),
        ("layers.1.out_b.weight", (4, 4), "[5, 2] + [4, 4], expected [5, 6] when joined along dim 1"),
        ("layers.1.out_b.weight", (5, 3), "[5, 2] + [5, 3], expected [5, 6] when joined along dim 1"),
    ],
)
def test_wrong_shapes(
    toy: ComponentFolder, name: str, shape: tuple[int, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_tensors(toy.path / NETWORK_FILE, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    message = refusal(toy, monkeypatch)
    assert str(toy.path / NETWORK_FILE) in message and name in message and expected in message


def test_integer_weights_are_refused(toy: ComponentFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, told in (
        (torch.int64, "layers.1.out.bias has the dtype I64, expected one of F64, F32"),
        (torch.int8, "holds 1 tensors in I8, which is not supported, expected F64, F32"),  # of any component
        (torch.uint8, "holds 1 tensors in U8, which is not supported"),
    ):
        integers = {"layers.1.out.bias": torch.ones(5, dtype=dtype)}
        edit_tensors(toy.path / NETWORK_FILE, lambda tensors, integers=integers: tensors.update(integers))
        assert told in refusal(toy, monkeypatch)


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (1, ("does not fit its config.json", "have no place in FluxNetwork: transformer_blocks.1.")),
        (3, ("does not fit its config.json", "tensors are missing: transformer_blocks.2.")),
        (0, ("does not fit its config.json", "have no place in FluxNetwork: transformer_blocks.0.")),
        ("two", ("config.json: ", "num_layers is 'two'")),
    ],
)
def test_a_config_that_does_not_fit_the_weights(
    flux: ComponentFolder, num_layers: object, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_json(flux.path / "config.json", num_layers=num_layers)
    message = refusal(ComponentFolder.at(flux.path), monkeypatch)
    assert all(part in message for part in expected)


def test_a_network_that_kdit_does_not_have(flux: ComponentFolder) -> None:
    edit_json(flux.path / "config.json", _class_name="PixArtTransformer2DModel")
    with pytest.raises(CheckpointError, match=r"config\.json: _class_name is 'PixArtTransformer2DModel'; kdit has"):
        load(ComponentFolder.at(flux.path))


def test_rules_must_cover_every_parameter_once(toy: ComponentFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = open_weights(toy.path, "diffusion_pytorch_model")
    net = ToyNetwork(extra=False)
    monkeypatch.setattr(ToyNetwork, "rules", ToyNetwork.rules[:-1])
    with pytest.raises(AssertionError, match=r"no WeightRule for .*scale"):
        plan_weights(net, weights)
    monkeypatch.setattr(
        ToyNetwork, "rules", (*ToyNetwork.rules, WeightRule("scale", ("scale",)), WeightRule("scale", ("a",)))
    )
    with pytest.raises(AssertionError, match="two WeightRules for scale"):
        plan_weights(net, weights)


def test_block_indices_of_two_digits(tmp_path: Path) -> None:
    class Deep(Network):
        rules = plain("blocks.{}", "layers.{}.linear")

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(12))

    tensors = {f"layers.{i}.linear.{leaf}": torch.full((1, 1) if leaf == "weight" else (1,), float(i))
               for i in range(12) for leaf in ("weight", "bias")}  # fmt: skip
    save_file(tensors, tmp_path / NETWORK_FILE)
    placements = plan_weights(Deep(), open_weights(tmp_path, "diffusion_pytorch_model"))
    assert {(p.source.name, p.target) for p in placements} == {
        (f"layers.{i}.linear.{leaf}", f"blocks.{i}.{leaf}") for i in range(12) for leaf in ("weight", "bias")
    }
