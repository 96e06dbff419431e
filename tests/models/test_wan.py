"""Wan 2.1 and 2.2: our network against diffusers' on the same random weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from kdit.errors import CheckpointError, InputError
from kdit.models.network import Network
from kdit.models.prepare import prepare_mod
from kdit.models.reference_call import NetworkCall, call_rows, run_call
from kdit.models.registry import network_class
from kdit.models.rows import ModTable, Static
from kdit.models.stack import predict, run_stack
from kdit.models.wan.network import WanNetwork
from kdit.models.wan.reference_call import from_reference
from kdit.models.weights.component_folder import ComponentFolder
from kdit.models.weights.loading import load_network
from kdit.ops.attention import SeqLayout
from kdit.ops.opset import OpSet
from tests.models.checkpoint_files import NETWORK_FILE, edit_tensors
from tests.models.fill import distance, randomise, sources_of, twin
from tests.models.stack_gate import ReplayGate

CONFIG: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 20,
    "freq_dim": 16,
    "ffn_dim": 72,
    "num_layers": 3,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "rope_max_seq_len": 16,
    "pos_embed_seq_len": None,
}
IMAGE = {"in_channels": 12, "image_dim": 28, "added_kv_proj_dim": 48}
VARIANTS: dict[str, dict[str, Any]] = {
    "t2v": {},
    "t2v_plain_cross": {"cross_attn_norm": False},
    "two_frame_patches": {"patch_size": (2, 2, 2)},
    "i2v_channels_only": {"in_channels": 12},
    "i2v_image_encoder": IMAGE,
    "first_last_frame": {**IMAGE, "pos_embed_seq_len": 10},
}
FRAMES, HEIGHT, WIDTH = 4, 6, 8
PER_FRAME = HEIGHT // 2 * (WIDTH // 2)
TOKENS = FRAMES * PER_FRAME


def make_reference(variant: str = "t2v") -> Any:
    return randomise(diffusers.WanTransformer3DModel(**{**CONFIG, **VARIANTS[variant]}), seed=1)


def make_inputs(variant: str = "t2v", times: tuple[int, ...] = (987, 250)) -> dict[str, Tensor]:
    config = {**CONFIG, **VARIANTS[variant]}
    generator = torch.Generator().manual_seed(2)
    num_rows = len(times)
    # With image tokens the reference finds the text by counting 512 from the end.
    txt_len = 512 if config["image_dim"] else 9
    inputs = {
        "hidden_states": torch.randn(num_rows, config["in_channels"], FRAMES, HEIGHT, WIDTH, generator=generator),
        "encoder_hidden_states": torch.randn(num_rows, txt_len, 20, generator=generator),
        "timestep": torch.tensor(times),
    }
    if config["image_dim"]:
        pictures = 2 if config["pos_embed_seq_len"] else 1
        inputs["encoder_hidden_states_image"] = torch.randn(num_rows * pictures, 5, 28, generator=generator)
    return inputs


def frame_times(*rows: tuple[float, ...]) -> Tensor:
    """One time per token, from one time per frame."""
    return torch.tensor(rows).repeat_interleave(PER_FRAME, dim=1)


FIRST_FRAME_CLEAN = frame_times((0.0, 987.0, 987.0, 987.0), (0.0, 250.0, 250.0, 250.0))


def make_call(times: tuple[int, ...] = (987, 250), variant: str = "t2v") -> NetworkCall:
    return from_reference(make_inputs(variant, times), {**CONFIG, **VARIANTS[variant]})


def clean_first_frame_call() -> NetworkCall:
    return from_reference({**make_inputs(), "timestep": FIRST_FRAME_CLEAN}, CONFIG)


def one_row(call: NetworkCall, row: int) -> NetworkCall:
    part = slice(row, row + 1)
    cond = {key: value[part] for key, value in call.cond.items()}
    return NetworkCall(call.latents[part], call.timesteps[part], cond, call.shape)


def make_net(variant: str = "t2v", ops: OpSet | None = None) -> Network:
    return twin(WanNetwork, make_reference(variant), ops=ops)


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_diffusers(variant: str) -> None:
    reference = make_reference(variant)
    inputs = make_inputs(variant)
    expected = reference(**inputs, return_dict=False)[0]
    assert distance(run_call(twin(WanNetwork, reference), from_reference(inputs, reference.config)), expected) < 2e-6


@pytest.mark.parametrize(
    ("times", "distinct"),
    [
        (frame_times((987.0,) * 4, (250.0,) * 4), 1),
        (FIRST_FRAME_CLEAN, 2),
        (frame_times((0.0, 10.0, 500.0, 500.0), (0.0, 0.0, 300.0, 300.0)), 3),
        (frame_times((0.0, 500.0, 500.0, 0.0), (1.0, 2.0, 2.0, 2.0)), 4),
    ],
)
def test_equals_diffusers_with_a_time_per_token(times: Tensor, distinct: int) -> None:
    reference = make_reference()
    inputs = {**make_inputs(), "timestep": times}
    net, call = twin(WanNetwork, reference), from_reference(inputs, reference.config)
    rows = call_rows(net, call)
    assert [m.shape[1] for m in rows.mod] == [6 * distinct] * 3 + [2 * distinct]  # never one per token
    assert distance(predict(net, rows), reference(**inputs, return_dict=False)[0]) < 2e-6


def test_tokens_of_one_frame_at_different_times_are_refused() -> None:
    times = FIRST_FRAME_CLEAN.clone()
    times[1, 3] = 5.0
    with pytest.raises(InputError, match="tokens of one latent frame have different times"):
        from_reference({**make_inputs(), "timestep": times}, CONFIG)


@pytest.mark.parametrize("variant", ["t2v", "i2v_image_encoder"])
def test_equals_diffusers_in_bfloat16(variant: str) -> None:
    reference = make_reference(variant).to(torch.bfloat16)
    net = twin(WanNetwork, reference).to(torch.bfloat16)
    inputs = {k: v if k == "timestep" else v.to(torch.bfloat16) for k, v in make_inputs(variant).items()}
    expected = reference(**inputs, return_dict=False)[0]
    got = run_call(net, from_reference(inputs, reference.config))
    assert got.dtype is torch.bfloat16
    assert distance(got.float(), expected.float()) < 2e-2


def test_equals_diffusers_in_bfloat16_with_its_float32_parts() -> None:
    reference = make_reference().to(torch.bfloat16)
    net = twin(WanNetwork, reference).to(torch.bfloat16)
    for module in (reference.condition_embedder.time_embedder, net.modulation.time, net.modulation.tables):
        module.float()
    for block in (*reference.blocks, reference):
        block.scale_shift_table.data = block.scale_shift_table.data.float()
    net.modulation.head.data = net.modulation.head.data.float()
    inputs = {k: v if k == "timestep" else v.to(torch.bfloat16) for k, v in make_inputs().items()}
    expected = reference(**inputs, return_dict=False)[0]
    got = run_call(net, from_reference(inputs, reference.config))
    assert got.dtype is torch.bfloat16
    assert distance(got.float(), expected.float()) < 2e-2


def save_reference(variant: str, folder: Path) -> ComponentFolder:
    make_reference(variant).save_pretrained(folder)
    return ComponentFolder.at(folder)


def load_in_bfloat16(component: ComponentFolder) -> Network:
    return load_network(component, dtype=torch.bfloat16, device="cpu", ops=OpSet())


@pytest.mark.parametrize("variant", ["t2v", "i2v_image_encoder", "first_last_frame"])
def test_a_bfloat16_load_keeps_the_reference_float32_parts(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    component = save_reference(variant, tmp_path)
    reference = diffusers.WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in reference.state_dict().items()}
    net = load_in_bfloat16(component)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32, torch.bfloat16}
    for target, sources in sources_of(net).items():
        assert {net.get_parameter(target).dtype} == {dtypes[name] for name in sources}, target

    inputs = {k: v if k == "timestep" else v.to(torch.bfloat16) for k, v in make_inputs(variant).items()}
    call = from_reference(inputs, reference.config)
    with torch.inference_mode():
        expected = reference(**inputs, return_dict=False)[0].float()
        kept = run_call(net, call)
        monkeypatch.setattr(WanNetwork, "float32", ())
        cast = run_call(load_in_bfloat16(component), call)
    assert kept.dtype is torch.bfloat16
    assert distance(kept.float(), expected) < 1e-2
    if variant == "t2v":  # attention to 512 text tokens rounds as much as the parts do
        assert distance(kept.float(), expected) < 0.5 * distance(cast.float(), expected)


def test_the_tensors_that_the_reference_ignores_are_ignored(tmp_path: Path) -> None:
    component = save_reference("i2v_image_encoder", tmp_path)
    expected = load_in_bfloat16(component).state_dict()
    unread = {f"blocks.{i}.attn2.norm_added_q.weight": torch.ones(48) for i in range(3)}
    edit_tensors(tmp_path / NETWORK_FILE, lambda tensors: tensors.update(unread))
    got = load_in_bfloat16(ComponentFolder.at(tmp_path)).state_dict()
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)
    edit_tensors(tmp_path / NETWORK_FILE, lambda tensors: tensors.update({"norm_added_q.weight": torch.ones(48)}))
    with pytest.raises(CheckpointError, match=r"1 tensors have no place in WanNetwork: norm_added_q\.weight"):
        load_in_bfloat16(ComponentFolder.at(tmp_path))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_checkpoint_tensor_has_one_place(variant: str) -> None:
    reference = make_reference(variant)
    used = Counter(name for names in sources_of(make_net(variant)).values() for name in names)
    assert used == Counter(reference.state_dict().keys())


@pytest.mark.parametrize("call", [make_call(), clean_first_frame_call(), make_call(variant="i2v_image_encoder")])
def test_rows_at_different_times_do_not_touch_each_other(call: NetworkCall) -> None:
    net = make_net("i2v_image_encoder" if "image" in call.cond else "t2v")
    together = run_call(net, call)
    assert distance(together[0], together[1]) > 0.1
    for row in range(2):
        assert distance(run_call(net, one_row(call, row)), together[row : row + 1]) < 1e-6


@pytest.mark.parametrize("call", [make_call((987, 250, 3)), clean_first_frame_call()])
def test_rows_are_bit_equal_alone_and_in_a_batch_when_batch_invariant(call: NetworkCall) -> None:
    net = make_net(ops=OpSet(batch_invariant=True))
    together = run_call(net, call)
    for row in range(together.shape[0]):
        assert torch.equal(run_call(net, one_row(call, row)), together[row : row + 1])


def test_requests_join_as_rows_of_one_forward() -> None:
    net = make_net("i2v_image_encoder", OpSet(batch_invariant=True))
    call = make_call(variant="i2v_image_encoder")
    both = call_rows(net, call)
    parts = [call_rows(net, one_row(call, row)) for row in range(2)]
    joined = Static.cat([part.static for part in parts])
    assert joined.layout == both.layout == SeqLayout((TOKENS,) * 2, (512,) * 2, TOKENS + 512)
    assert joined.rows.keys() == {"frames"} | {f"{kind}_kv.{i}" for kind in ("txt", "image") for i in range(3)}
    assert all(torch.equal(joined.rows[key], both.static.rows[key]) for key in both.static.rows)
    assert torch.equal(joined.shared["rope"], both.static.shared["rope"])


@pytest.mark.parametrize("times", [torch.tensor([999, 640, 3]), torch.tensor([[0.0, 999.0], [0.0, 640.0], [0.0, 3.0]])])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_table_of_all_steps_equals_each_step(times: Tensor, batch_invariant: bool) -> None:
    net, cond = make_net(ops=OpSet(batch_invariant=batch_invariant)), make_call().cond
    table = prepare_mod(net, times, cond)
    for step in range(3):
        inline = prepare_mod(net, times[step : step + 1], cond).at(0)
        for got, expected in zip(table.at(step), inline, strict=True):
            assert torch.equal(got, expected) if batch_invariant else distance(got, expected) < 1e-6


def test_tables_are_float32_and_repeat_no_row_in_memory() -> None:
    net = make_net().to(torch.bfloat16)
    cond = {"txt": torch.zeros(2, 9, 20, dtype=torch.bfloat16)}
    table = net.prepare_mod(torch.tensor([[0.0, 5.0]]), cond)
    assert [(tuple(t.shape), t.dtype, t.stride(1)) for t in table.rows] == [
        ((1, 2, n, 48), torch.float32, 0) for n in (12, 12, 12, 4)
    ]
    assert ModTable.cat([table.narrow(0, 1), table.narrow(1, 1)]).rows[0].shape == (1, 2, 12, 48)


@pytest.mark.parametrize("part", ["modulation", "context"])
def test_the_loop_reads_no_weight_of_what_was_prepared(part: str) -> None:
    net = make_net("i2v_image_encoder")
    rows = call_rows(net, make_call(variant="i2v_image_encoder"))
    expected = predict(net, rows)
    for weight in getattr(net, part).parameters():
        weight.fill_(torch.nan)
    assert torch.equal(predict(net, rows), expected)


@pytest.mark.parametrize("variant", ["t2v", "i2v_image_encoder"])
def test_selected_rows_are_predicted_alone(variant: str) -> None:
    net = make_net(variant)
    rows = call_rows(net, make_call((987, 250, 3), variant))
    chosen = rows.select(torch.tensor([True, False, True]))
    assert chosen.index == (0, 2)
    assert distance(predict(net, chosen), predict(net, rows)[[0, 2]]) < 1e-6


@pytest.mark.parametrize("skip", [set(), {0}, {0, 1}])
def test_gate_replays_rows(skip: set[int]) -> None:
    net = make_net()
    rows, earlier = call_rows(net, clean_first_frame_call()), call_rows(net, make_call((999, 999)))
    replayed = run_stack(net, earlier)
    gate = ReplayGate((1,), skip, replayed)
    got = predict(net, rows, gate)
    computed, skipped = predict(net, rows), net.head(replayed, rows)
    for row in range(2):
        assert distance(got[row], (skipped if row in skip else computed)[row]) < 1e-6
    kept = tuple(i for i in range(2) if i not in skip)
    assert gate.recorded == [(0, (0, 1), False)] + ([(3, kept, False)] if kept else [])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_layers": -1}, "num_layers is -1, expected a positive whole number"),
        ({"qk_norm": None}, "qk_norm is None, expected 'rms_norm_across_heads'"),
        ({"patch_size": (2, 2)}, r"patch_size is \(2, 2\), expected three whole numbers"),
        ({"patch_size": 2}, "patch_size is 2, expected a list of whole numbers"),
        ({"cross_attn_norm": "yes"}, "cross_attn_norm is 'yes', expected true or false"),
        ({"eps": 0}, "eps is 0, expected a positive number"),
        ({"out_channels": 8}, "out_channels is 8, expected at most in_channels, 4"),
        ({"attention_head_dim": 13}, "attention_head_dim is 13, expected an even number"),
        ({"image_dim": 28}, "added_kv_proj_dim is None, expected 48"),
        ({"added_kv_proj_dim": 48}, "added_kv_proj_dim is 48, expected None"),
        ({"pos_embed_seq_len": 10}, "pos_embed_seq_len is 10, expected null"),
    ],
)
def test_bad_config_is_refused_by_name(change: dict[str, object], expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        WanNetwork.from_config({**CONFIG, **change}, ops=OpSet())


def test_an_absent_key_has_the_reference_default() -> None:
    config = {key: value for key, value in CONFIG.items() if key not in ("ffn_dim", "num_layers")}
    net = WanNetwork.from_config({**config, "num_layers": 1}, ops=OpSet())
    expected = diffusers.WanTransformer3DModel(**config, num_layers=1).state_dict()
    assert net.get_parameter("blocks.0.mlp.fc_in.weight").shape == expected["blocks.0.ffn.net.0.proj.weight"].shape


@pytest.mark.parametrize("size", [(1, 34, 8), (17, 2, 2), (1, 3, 2)])
def test_size_out_of_range_is_refused(size: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match=r"latent size .* multiples of \(1, 2, 2\) with at most 16 patches"):
        make_net().prepare_static(make_call().cond, (4, *size))


def test_one_picture_for_a_first_and_last_frame_model_is_refused() -> None:
    call = make_call(variant="i2v_image_encoder")
    with pytest.raises(InputError, match="got 5 image-encoder tokens, expected 10"):
        make_net("first_last_frame").prepare_static(call.cond, call.shape)


def test_registry_finds_the_network() -> None:
    assert network_class("WanTransformer3DModel", "transformer/config.json") is WanNetwork
