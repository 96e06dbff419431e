"""FLUX.1 network against diffusers' module, and the properties the loop relies on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from kdit.errors import CheckpointError, InputError
from kdit.models.flux.latents import pack, unpack
from kdit.models.flux.network import FluxNetwork
from kdit.models.flux.reference_call import from_reference
from kdit.models.reference_call import run_call
from kdit.models.rows import ModTable, Rows, Static
from kdit.models.stack import predict
from kdit.ops.opset import OpSet
from tests.models.fill import distance, randomise, sources_of, twin

CONFIG: dict[str, Any] = dict(
    patch_size=1,
    in_channels=16,
    num_layers=2,
    num_single_layers=3,
    attention_head_dim=20,
    num_attention_heads=4,
    joint_attention_dim=24,
    pooled_projection_dim=28,
    guidance_embeds=True,
    axes_dims_rope=(4, 8, 8),
)
SHAPE = (4, 10, 14)  # 35 tokens
F32 = torch.float32


def reference(**changes: Any) -> FluxTransformer2DModel:
    module = FluxTransformer2DModel(**{**CONFIG, **changes})
    randomise(module, 3)
    return module


def conditioning(num_rows: int, seed: int = 0, num_text: int = 7) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "txt": torch.randn(num_rows, num_text, 24, generator=g),
        "pooled": torch.randn(num_rows, 28, generator=g),
        "guidance": 1 + torch.rand(num_rows, generator=g) * 4,
    }


def latents(num_rows: int, seed: int = 9) -> Tensor:
    return pack(torch.randn(num_rows, *SHAPE, generator=torch.Generator().manual_seed(seed)))


def forward(net: FluxNetwork, x: Tensor, time: float, cond: dict[str, Tensor]) -> Tensor:
    mod = net.prepare_mod(torch.tensor([time]), cond).at(0)
    return predict(net, Rows(x, mod, net.prepare_static(cond, SHAPE), tuple(range(x.shape[0]))))


def reference_inputs(x: Tensor, cond: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    ids = torch.zeros(35, 3)
    ids[:, 1], ids[:, 2] = torch.arange(5).repeat_interleave(7), torch.arange(7).repeat(5)
    return dict(
        hidden_states=x.to(dtype),
        encoder_hidden_states=cond["txt"].to(dtype),
        pooled_projections=cond["pooled"].to(dtype),
        timestep=torch.full((x.shape[0],), 0.7, dtype=dtype),
        guidance=cond["guidance"],
        img_ids=ids,
        txt_ids=torch.zeros(7, 3),
    )


@pytest.mark.parametrize("guidance", [True, False])
@pytest.mark.parametrize("singles", [1, 3])
def test_equals_the_reference(guidance: bool, singles: int) -> None:
    module = reference(guidance_embeds=guidance, num_single_layers=singles)
    net = twin(FluxNetwork, module)
    cond, x = conditioning(2), latents(2)
    call = reference_inputs(x, cond, F32)
    if not guidance:
        del call["guidance"]
    with torch.no_grad():
        expected = module(**call, return_dict=False)[0]
        got = run_call(net, from_reference(call, CONFIG))
    assert distance(got, expected) < 2e-6


@pytest.mark.parametrize(("doubles", "singles"), [(0, 2), (2, 0), (0, 0)])
def test_equals_the_reference_without_blocks_of_one_kind(doubles: int, singles: int) -> None:
    module = reference(num_layers=doubles, num_single_layers=singles)
    net = twin(FluxNetwork, module)
    assert len(net.blocks) == doubles + singles
    call = reference_inputs(latents(2), conditioning(2), F32)
    with torch.no_grad():
        expected = module(**call, return_dict=False)[0]
        got = run_call(net, from_reference(call, CONFIG))
    assert distance(got, expected) < 2e-6


def test_channels_that_only_condition_come_with_the_latents() -> None:
    module = reference(in_channels=36, out_channels=16)
    call = reference_inputs(torch.randn(2, 35, 36, generator=torch.Generator().manual_seed(1)), conditioning(2), F32)
    with torch.no_grad():
        expected = module(**call, return_dict=False)[0]
        got = run_call(twin(FluxNetwork, module), from_reference(call, CONFIG))
    assert got.shape == (2, 35, 16)
    assert distance(got, expected) < 2e-6


@pytest.mark.parametrize("first_axis", [0.0, 1.0])
@pytest.mark.parametrize("num_reference", [0, 6])
def test_a_recorded_call_with_reference_tokens_is_refused(first_axis: float, num_reference: int) -> None:
    call = reference_inputs(latents(1), conditioning(1), F32)
    call["hidden_states"] = torch.cat((call["hidden_states"], call["hidden_states"][:, :num_reference]), dim=1)
    ids = torch.cat((call["img_ids"], call["img_ids"][:num_reference]))
    ids[-6:, 0] = first_axis
    call["img_ids"] = ids
    if first_axis == num_reference == 0:
        assert from_reference(call, CONFIG).shape == SHAPE
        return
    got = f"got {35 + num_reference} latent tokens, expected one for each position of the 5x7 grid"
    with pytest.raises(InputError, match=f"reference tokens are not supported yet: {got}"):
        from_reference(call, CONFIG)


def test_every_checkpoint_name_belongs_to_one_parameter() -> None:
    module = reference()
    names = [name for sources in sources_of(twin(FluxNetwork, module)).values() for name in sources]
    assert sorted(names) == sorted(module.state_dict())


def test_bfloat16_rounds_where_the_reference_rounds() -> None:
    """Times and guidance are scaled by 1000 in bfloat16, which moves them far; both must move alike."""
    module = reference()
    half = twin(FluxNetwork, module).to(torch.bfloat16)
    given = reference_inputs(latents(1), conditioning(1), torch.bfloat16)
    with torch.no_grad():
        expected = module.to(torch.bfloat16)(**given, return_dict=False)[0]
        got = run_call(half, from_reference(given, CONFIG))
    assert got.dtype == torch.bfloat16
    assert 1e-4 < distance(got.float(), expected.float()) < 3e-2


def test_a_table_of_many_steps_equals_single_steps() -> None:
    net, cond = twin(FluxNetwork, reference()), conditioning(2)
    times = torch.tensor([1.0, 0.6, 0.25])
    table = net.prepare_mod(times, cond)
    for i in range(3):
        for whole, single in zip(table.at(i), net.prepare_mod(times[i : i + 1], cond).at(0), strict=True):
            torch.testing.assert_close(whole, single, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_rows_at_different_times_share_a_forward(batch_invariant: bool) -> None:
    net = twin(FluxNetwork, reference(), ops=OpSet(batch_invariant=batch_invariant))
    cases = [(latents(1, i), 0.9 - 0.3 * i, conditioning(1, i)) for i in range(3)]
    alone = [forward(net, *case) for case in cases]
    mods = [net.prepare_mod(torch.tensor([time]), cond) for _, time, cond in cases]
    rows = Rows(
        torch.cat([x for x, _, _ in cases]),
        ModTable.cat(mods).at(0),
        Static.cat([net.prepare_static(cond, SHAPE) for _, _, cond in cases]),
        (0, 1, 2),
    )
    together = predict(net, rows)
    if batch_invariant:
        assert torch.equal(together, torch.cat(alone))
    else:
        assert distance(together, torch.cat(alone)) < 1e-6


def test_the_last_block_leaves_the_text_out() -> None:
    net, cond = twin(FluxNetwork, reference()), conditioning(1)
    rows = Rows(latents(1), net.prepare_mod(torch.tensor([0.5]), cond).at(0), net.prepare_static(cond, SHAPE), (0,))
    x = net.embed(rows)
    for i, block in enumerate(net.blocks):
        assert x.txt is not None, i
        x = block(x, rows.mod[i], rows)
    assert x.txt is None


def test_packing_is_a_bijection_of_2x2_neighbours() -> None:
    grid = torch.arange(2 * 4 * 6 * 8).view(2, 4, 6, 8)
    tokens = pack(grid)
    assert tokens.shape == (2, 12, 16)
    assert tokens[0, 0, :4].tolist() == [grid[0, 0, 0, 0], grid[0, 0, 0, 1], grid[0, 0, 1, 0], grid[0, 0, 1, 1]]
    assert torch.equal(unpack(tokens, 6, 8), grid)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("patch_size", 2),
        ("num_layers", -1),
        ("num_single_layers", True),
        ("num_attention_heads", "4"),
        ("axes_dims_rope", [4, 8]),
        ("axes_dims_rope", [5, 7, 8]),
        ("guidance_embeds", 1),
        ("in_channels", None),
    ],
)
def test_a_config_value_that_does_not_fit_is_named(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=key):
        FluxNetwork.from_config({**CONFIG, key: value}, ops=OpSet())
