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
from kdit.models.flux.references import reference_tokens
from kdit.models.prepare import prepare_mod, prepare_static
from kdit.models.reference_call import run_call
from kdit.models.rows import ModTable, Rows, Static, Streams
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_that_only_condition_are_embedded_once(dtype: torch.dtype) -> None:
    sizes = dict(in_channels=36, out_channels=16)
    module = reference(**sizes).to(dtype)
    hidden = torch.randn(2, 35, 36, generator=torch.Generator().manual_seed(1))
    given = reference_inputs(hidden, conditioning(2), dtype)
    call = from_reference(given, {**CONFIG, **sizes})
    assert call.latents.shape == (2, 35, 16) and call.cond["channels"].shape == (2, 35, 20)
    net = twin(FluxNetwork, reference(**sizes)).to(dtype)
    with torch.no_grad():
        expected = module(**given, return_dict=False)[0]
        got = run_call(net, call)
    assert got.shape == (2, 35, 16)
    assert distance(got.float(), expected.float()) < (2e-6 if dtype == F32 else 3e-2)
    static = net.prepare_static({key: value.to(dtype) for key, value in call.cond.items()}, call.shape)
    assert static.rows["channels"].shape == (2, 35, 80)


# ---- tokens of reference pictures


def reference_pictures(sizes: list[tuple[int, int]], seed: int = 5) -> list[Tensor]:
    """Latents [1, 4, h, w] of pictures with (h, w) tokens."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 4, 2 * height, 2 * width, generator=g) for height, width in sizes]


def referring(sizes: list[list[tuple[int, int]]], seed: int = 0) -> dict[str, Tensor]:
    """Conditioning of a row per list, each with its own references."""
    tokens = reference_tokens([reference_pictures(own, 5 + i) for i, own in enumerate(sizes)])
    assert tokens is not None
    return {**conditioning(len(sizes), seed), "ref": tokens.tokens, "ref_ids": tokens.ids}


def prepared_forward(net: FluxNetwork, x: Tensor, time: float, cond: dict[str, Tensor]) -> Tensor:
    """As the loop does it: row by row if the network is batch-invariant."""
    mod = prepare_mod(net, torch.tensor([time]), cond).at(0)
    return predict(net, Rows(x, mod, prepare_static(net, cond, SHAPE), tuple(range(x.shape[0]))))


def row_of(cond: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    """One row without the padding of its references."""
    own = {key: value[i : i + 1] for key, value in cond.items()}
    length = int(own["ref_ids"][0, :, 0].sum())
    return {key: value[:, :length] if key.startswith("ref") else value for key, value in own.items()}


@pytest.mark.parametrize("blocks", [{}, dict(num_single_layers=1), dict(num_single_layers=0)])
def test_reference_tokens_equal_the_reference(blocks: dict[str, int]) -> None:
    module = reference(**blocks)
    cond = referring([[(2, 3), (4, 2)]] * 2)
    call = reference_inputs(latents(2), cond, F32)
    call["hidden_states"] = torch.cat((call["hidden_states"], cond["ref"]), dim=1)
    call["img_ids"] = torch.cat((call["img_ids"], cond["ref_ids"][0]))
    with torch.no_grad():
        expected = module(**call, return_dict=False)[0]
        read = from_reference(call, {**CONFIG, **blocks})
        got = run_call(twin(FluxNetwork, module), read)
    assert read.num_tokens == 35 and got.shape == (2, 35, 16)
    assert distance(got, expected[:, :35]) < 2e-6


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_rows_with_references_of_other_lengths_do_not_see_the_padding(batch_invariant: bool) -> None:
    net = twin(FluxNetwork, reference(), ops=OpSet(batch_invariant=batch_invariant))
    cond, x = referring([[(2, 3)], [(4, 2), (3, 3)], []]), latents(3)
    static = net.prepare_static(cond, SHAPE)
    assert static.layout.img == (41, 52, 35) and static.layout.padded == 7 + 52
    together = prepared_forward(net, x, 0.4, cond)
    alone = [prepared_forward(net, x[i : i + 1], 0.4, row_of(cond, i)) for i in range(2)]
    without = {key: value[2:] for key, value in conditioning(3).items()}
    alone.append(prepared_forward(net, x[2:], 0.4, without))
    if batch_invariant:
        assert torch.equal(together, torch.cat(alone))
    else:
        assert distance(together, torch.cat(alone)) < 1e-6
    other = {**cond, "ref": torch.cat((cond["ref"][:1] + 1, cond["ref"][1:]))}
    changed = (prepared_forward(net, x, 0.4, other) - together).abs().amax((1, 2))
    assert changed[0] > 1e-3 and changed[1:].max() < 1e-5


def test_taken_out_of_a_batch_a_row_still_does_not_see_the_padding() -> None:
    """As a step cache takes them: hidden tokens keep the length that they were padded to."""
    net = twin(FluxNetwork, reference())
    cond, x = referring([[(2, 3)], [(4, 3)]]), latents(2)
    mod = net.prepare_mod(torch.tensor([0.4]), cond).at(0)
    rows = Rows(x, mod, net.prepare_static(cond, SHAPE), (0, 1))
    first = rows.select(torch.tensor([True, False]))
    hidden = net.embed(rows)
    assert hidden.txt is not None
    tokens = Streams(hidden.img[:1], hidden.txt[:1])
    for i, block in enumerate(net.blocks):
        tokens = block(tokens, first.mod[i], first)
    assert distance(net.head(tokens, first), predict(net, rows)[:1]) < 1e-6


def test_a_single_reference_has_the_coordinates_of_its_grid() -> None:
    (picture,) = reference_pictures([(2, 3)])
    tokens = reference_tokens([[picture]])
    assert tokens is not None
    assert torch.equal(tokens.tokens, pack(picture))
    assert tokens.ids[0].tolist() == [[1, row, column] for row in range(2) for column in range(3)]


def test_several_references_of_one_row_lie_beside_each_other() -> None:
    tokens = reference_tokens([reference_pictures([(2, 3), (4, 2), (1, 6)])])
    assert tokens is not None
    ids = [tuple(int(n) for n in own) for own in tokens.ids[0].tolist()]
    assert len(set(ids)) == len(ids) == 6 + 8 + 6
    assert min(ids[6:14]) == (1, 0, 3)  # right of the first: below it would make a sheet of 6 rows
    assert min(ids[14:]) == (1, 4, 0)  # below both


def test_without_references_there_are_no_tokens() -> None:
    assert reference_tokens([[], []]) is None


def test_a_recorded_call_whose_positions_are_no_grid_is_refused() -> None:
    call = reference_inputs(latents(1), conditioning(1), F32)
    assert from_reference(call, CONFIG).shape == SHAPE
    call["img_ids"][-6:, 0] = 1.0
    with pytest.raises(InputError, match="got 35 tokens and 35 positions, 29 of these with 0 on the first axis"):
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
