"""SD3 and SD3.5: our network against diffusers' on the same random weights."""

from __future__ import annotations

from collections import Counter
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
from kdit.models.rows import Static
from kdit.models.sd3.network import SD3Network
from kdit.models.sd3.reference_call import from_reference
from kdit.models.stack import predict, run_stack
from kdit.ops.opset import OpSet
from tests.models.fill import distance, randomise, sources_of, twin
from tests.models.stack_gate import ReplayGate

CONFIG: dict[str, Any] = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 20,
    "pos_embed_max_size": 12,
    "dual_attention_layers": (),
    "qk_norm": None,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "sd3": {},
    "sd35_large": {"qk_norm": "rms_norm"},
    "sd35_medium": {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)},
    "dual_to_the_end": {"dual_attention_layers": (0, 1, 2)},
}


def make_reference(variant: str) -> Any:
    return randomise(diffusers.SD3Transformer2DModel(**{**CONFIG, **VARIANTS[variant]}), seed=1)


def make_inputs(times: tuple[float, ...] = (900.0, 135.25)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    num_rows = len(times)
    return {
        "hidden_states": torch.randn(num_rows, 4, 10, 14, generator=generator),
        "encoder_hidden_states": torch.randn(num_rows, 7, 24, generator=generator),
        "pooled_projections": torch.randn(num_rows, 20, generator=generator),
        "timestep": torch.tensor(times),
    }


def make_call(times: tuple[float, ...] = (900.0, 135.25)) -> NetworkCall:
    return from_reference(make_inputs(times), CONFIG)


def one_row(call: NetworkCall, row: int) -> NetworkCall:
    part = slice(row, row + 1)
    cond = {key: value[part] for key, value in call.cond.items()}
    return NetworkCall(call.latents[part], call.timesteps[part], cond, call.shape)


def make_net(variant: str = "sd35_medium", ops: OpSet | None = None) -> Network:
    return twin(SD3Network, make_reference(variant), ops=ops)


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_diffusers(variant: str) -> None:
    reference = make_reference(variant)
    inputs = make_inputs()
    expected = reference(**inputs, return_dict=False)[0]
    assert distance(run_call(twin(SD3Network, reference), from_reference(inputs, reference.config)), expected) < 2e-6


def test_equals_diffusers_in_bfloat16() -> None:
    reference = make_reference("sd35_medium").to(torch.bfloat16)
    net = twin(SD3Network, reference).to(torch.bfloat16)
    inputs = {k: v if k == "timestep" else v.to(torch.bfloat16) for k, v in make_inputs().items()}
    expected = reference(**inputs, return_dict=False)[0]
    got = run_call(net, from_reference(inputs, reference.config))
    assert got.dtype is torch.bfloat16
    assert distance(got.float(), expected.float()) < 2e-2


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_checkpoint_tensor_has_one_place(variant: str) -> None:
    reference = make_reference(variant)
    used = Counter(name for names in sources_of(make_net(variant)).values() for name in names)
    assert used == Counter(reference.state_dict().keys())


def test_rows_at_different_times_do_not_touch_each_other() -> None:
    call = make_call()
    net = make_net()
    together = run_call(net, call)
    assert distance(together[0], together[1]) > 0.1
    for row in range(2):
        assert distance(run_call(net, one_row(call, row)), together[row : row + 1]) < 1e-6


def test_rows_are_bit_equal_alone_and_in_a_batch_when_batch_invariant() -> None:
    call = make_call((900.0, 135.25, 10.5))
    net = make_net(ops=OpSet(batch_invariant=True))
    together = run_call(net, call)
    for row in range(3):
        assert torch.equal(run_call(net, one_row(call, row)), together[row : row + 1])


def test_requests_join_as_rows_of_one_forward() -> None:
    net = make_net(ops=OpSet(batch_invariant=True))
    call = make_call()
    both = call_rows(net, call)
    parts = [call_rows(net, one_row(call, row)) for row in range(2)]
    joined = Static.cat([part.static for part in parts])
    assert joined.layout == both.layout and both.layout[:3] == ((35, 35), (7, 7), 35 + 7)
    assert all(torch.equal(joined.rows[key], both.static.rows[key]) for key in both.static.rows)
    assert torch.equal(joined.shared["pos"], both.static.shared["pos"])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_table_of_all_steps_equals_each_step(batch_invariant: bool) -> None:
    net = make_net(ops=OpSet(batch_invariant=batch_invariant))
    times, cond = torch.tensor([1000.0, 750.5, 3.0]), make_call().cond
    table = prepare_mod(net, times, cond)
    for step in range(3):
        inline = prepare_mod(net, times[step : step + 1], cond).at(0)
        for got, expected in zip(table.at(step), inline, strict=True):
            assert torch.equal(got, expected) if batch_invariant else distance(got, expected) < 1e-6


def test_modulation_vectors_per_block() -> None:
    table = make_net("sd35_medium").prepare_mod(torch.tensor([5.0, 4.0]), make_call().cond)
    assert [tuple(t.shape) for t in table.rows] == [(2, 2, n, 32) for n in (15, 15, 8, 2)]


def test_the_loop_reads_no_modulation_weight() -> None:
    net = make_net()
    rows = call_rows(net, make_call())
    expected = predict(net, rows)
    for weight in net.modulation.parameters():
        weight.fill_(torch.nan)
    assert torch.equal(predict(net, rows), expected)


def test_selected_rows_are_predicted_alone() -> None:
    net = make_net()
    rows = call_rows(net, make_call((900.0, 135.25, 10.5)))
    chosen = rows.select(torch.tensor([False, True, True]))
    assert chosen.index == (1, 2) and chosen.layout.img == (35, 35)
    assert distance(predict(net, chosen), predict(net, rows)[1:]) < 1e-6


def test_the_last_block_drops_the_text() -> None:
    net = make_net()
    rows = call_rows(net, make_call())
    x = net.embed(rows)
    for block, mod in zip(net.blocks, rows.mod[:-1], strict=True):
        assert x.txt is not None
        x = block(x, mod, rows)
    assert x.txt is None and run_stack(net, rows).txt is None


@pytest.mark.parametrize("skip", [set(), {1}, {0, 1}])
def test_gate_replays_rows_at_the_end_where_there_is_no_text(skip: set[int]) -> None:
    net = make_net()
    rows, earlier = call_rows(net, make_call()), call_rows(net, make_call((990.0, 990.0)))
    replayed = run_stack(net, earlier)
    gate = ReplayGate((1,), skip, replayed)
    got = predict(net, rows, gate)
    computed, skipped = predict(net, rows), net.head(replayed, rows)
    for row in range(2):
        assert distance(got[row], (skipped if row in skip else computed)[row]) < 1e-6
    kept = tuple(i for i in range(2) if i not in skip)
    assert gate.recorded == [(0, (0, 1), True)] + ([(3, kept, False)] if kept else [])


def test_gate_replays_rows_in_the_middle_with_their_text() -> None:
    net = make_net()
    rows = call_rows(net, make_call())
    x = net.embed(rows)
    for block, mod in zip(net.blocks[:2], rows.mod[:2], strict=True):
        x = block(x, mod, rows)
    gate = ReplayGate((1, 2), {0}, x)
    assert distance(predict(net, rows, gate), predict(net, rows)) < 1e-6
    assert gate.recorded == [(0, (0, 1), True), (2, (1,), True)]
    halved = ReplayGate((1, 2), {0}, type(x)(x.img / 2, x.txt))
    assert distance(predict(net, rows, halved)[0], predict(net, rows)[0]) > 1e-3


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("num_layers", 0, "num_layers is 0, expected a positive whole number"),
        ("patch_size", "2", "patch_size is '2', expected a positive whole number"),
        ("joint_attention_dim", True, "joint_attention_dim is True"),
        ("qk_norm", "layer_norm", "qk_norm is 'layer_norm', expected None or 'rms_norm'"),
        ("caption_projection_dim", 48, "caption_projection_dim is 48, expected 32"),
        ("out_channels", 8, "out_channels is 8, expected 4"),
        ("dual_attention_layers", [3], r"dual_attention_layers is \[3\], expected a list of whole numbers from 0 to 2"),
        ("pos_embed_max_size", None, "pos_embed_max_size is None"),
    ],
)
def test_bad_config_is_refused_by_name(key: str, value: object, expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        SD3Network.from_config({**CONFIG, key: value}, ops=OpSet())


def test_an_absent_key_has_the_reference_default() -> None:
    config = {key: value for key, value in CONFIG.items() if key != "num_attention_heads"}
    expected = diffusers.SD3Transformer2DModel(**{**config, "caption_projection_dim": 144}).state_dict()
    net = SD3Network.from_config({**config, "caption_projection_dim": 144}, ops=OpSet())
    sizes = {name: parameter.numel() for name, parameter in net.named_parameters()}
    for target, sources in sources_of(net).items():
        assert sizes[target] == sum(expected[name].numel() for name in sources)


def test_keys_that_old_checkpoints_lack_have_their_old_meaning() -> None:
    config = {key: value for key, value in CONFIG.items() if key not in ("qk_norm", "dual_attention_layers")}
    net = SD3Network.from_config({**config, "out_channels": None}, ops=OpSet())
    assert net.params == SD3Network.from_config(CONFIG, ops=OpSet()).params


@pytest.mark.parametrize("size", [(26, 8), (8, 26), (9, 8)])
def test_size_beyond_the_position_table_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=f"latent size {size[1]}x{size[0]}: .* multiple of 2, at most 24 "):
        make_net().prepare_static(make_call().cond, (4, *size))


def test_registry_finds_the_network() -> None:
    assert network_class("SD3Transformer2DModel", "transformer/config.json") is SD3Network
