"""run_stack and its gate, with a toy network and a recording gate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kdit.models.network import Network
from kdit.models.rows import Rows, Static, Streams
from kdit.models.stack import predict, run_stack
from kdit.ops.attention import SeqLayout
from kdit.ops.opset import OpSet
from kdit.parallel import Group


class AddBlock(nn.Module):
    """Adds the block's modulation to the image and a constant to the text; counts the rows it computed."""

    def __init__(self, drop_text: bool = False) -> None:
        super().__init__()
        self.drop_text = drop_text
        self.seen: list[int] = []

    def forward(self, x: Streams, mod: Tensor, rows: Rows) -> Streams:
        self.seen.append(x.img.shape[0])
        assert mod.shape[0] == x.img.shape[0] == len(rows.index) == len(rows.layout.img)
        assert x.txt is not None
        return Streams(x.img + mod, None if self.drop_text else x.txt + 1)


class AddNetwork(Network):
    rules = ()

    def __init__(self, num_blocks: int, drop_text: bool = False) -> None:
        super().__init__()
        self.ops = OpSet()
        self.blocks = nn.ModuleList(AddBlock(drop_text and i == num_blocks - 1) for i in range(num_blocks))

    def embed(self, rows: Rows) -> Streams:
        return Streams(rows.latents, rows.static.rows["txt"])

    def head(self, x: Streams, rows: Rows) -> Tensor:
        return x.img * rows.mod[-1]


class RecordingGate:
    """Skips the rows in ``skip``; what comes back is the tap's input plus 100."""

    def __init__(self, taps: tuple[int, ...], skip: set[int]) -> None:
        self.taps, self.skip = taps, skip
        self.calls: list[tuple[str, int, tuple[int, ...]]] = []

    def record(self, tap: int, x: Streams, rows: Rows) -> None:
        self.calls.append(("record", tap, rows.index))

    def decide(self, tap: int, x: Streams, rows: Rows, vote: Group) -> Tensor:
        assert vote.size == 1
        self.calls.append(("decide", tap, rows.index))
        return torch.tensor([i not in self.skip for i in rows.index])

    def reuse(self, tap: int, x: Streams, rows: Rows) -> Streams:
        self.calls.append(("reuse", tap, rows.index))
        return Streams(x.img + 100, None if x.txt is None else x.txt + 100)


def make_rows(num_rows: int, num_blocks: int) -> Rows:
    img = torch.arange(num_rows, dtype=torch.float32)[:, None, None].expand(num_rows, 2, 3).clone()
    mod = tuple(torch.full((num_rows, 1, 3), 10.0 ** (i - 2)) for i in range(num_blocks))
    layout = SeqLayout((2,) * num_rows, (1,) * num_rows, 3)
    static = Static(layout, {"txt": torch.zeros(num_rows, 1, 3)})
    return Rows(img, (*mod, torch.ones(num_rows, 1, 3)), static, tuple(range(num_rows)))


def first(x: Tensor) -> list[float]:
    return [round(v, 3) for v in x[:, 0, 0].tolist()]


def test_without_a_gate_every_block_runs_in_order() -> None:
    net = AddNetwork(3)
    x = run_stack(net, make_rows(2, 3))
    assert first(x.img) == [1.11, 2.11]
    assert x.txt is not None and first(x.txt) == [3, 3]


def test_a_gate_that_keeps_all_rows_changes_nothing() -> None:
    gate = RecordingGate((1,), skip=set())
    plain, gated = run_stack(AddNetwork(3), make_rows(2, 3)), run_stack(AddNetwork(3), make_rows(2, 3), gate)
    assert torch.equal(plain.img, gated.img)
    assert gate.calls == [("record", 0, (0, 1)), ("decide", 1, (0, 1)), ("record", 3, (0, 1))]


def test_skipped_rows_keep_their_place_and_are_not_computed() -> None:
    net, gate = AddNetwork(3), RecordingGate((1,), skip={1})
    x = run_stack(net, make_rows(3, 3), gate)
    assert first(x.img) == [1.11, 101.01, 3.11]
    assert x.txt is not None and first(x.txt) == [3, 101, 3]
    assert [block.seen for block in net.blocks] == [[3], [2], [2]]
    assert gate.calls == [
        ("record", 0, (0, 1, 2)),
        ("decide", 1, (0, 1, 2)),
        ("record", 3, (0, 2)),
        ("reuse", 3, (1,)),
    ]


def test_a_second_tap_brings_skipped_rows_back_before_the_last_blocks() -> None:
    net, gate = AddNetwork(4), RecordingGate((1, 3), skip={0, 1})
    x = run_stack(net, make_rows(2, 4), gate)
    assert [block.seen for block in net.blocks] == [[2], [], [], [2]]
    assert first(x.img) == [110.01, 111.01]
    assert ("reuse", 3, (0, 1)) in gate.calls and ("record", 3, (0, 1)) not in gate.calls


@pytest.mark.parametrize("skip", [set(), {0}, {0, 1}])
def test_a_stack_that_drops_its_text_works_with_every_decision(skip: set[int]) -> None:
    class DropText(RecordingGate):
        def reuse(self, tap: int, x: Streams, rows: Rows) -> Streams:
            return Streams(x.img, None)

    x = run_stack(AddNetwork(2, drop_text=True), make_rows(2, 2), DropText((0,), skip))
    assert x.txt is None and x.img.shape == (2, 2, 3)


def test_predict_ends_in_the_head() -> None:
    rows = make_rows(1, 1)
    doubled = Rows(rows.latents, (rows.mod[0], 2 * rows.mod[1]), rows.static, rows.index)
    assert torch.equal(predict(AddNetwork(1), doubled), 2 * predict(AddNetwork(1), rows))


@pytest.mark.parametrize("part", [lambda s: s.narrow(1, 1), lambda s: s.select([1])])
def test_parts_of_static_take_layout_and_rows_along(part: Callable[[Static], Static]) -> None:
    layout = SeqLayout((2, 3), (1, 2), 5)
    static = Static(layout, {"a": torch.tensor([1, 2])}, {"b": torch.tensor([9])})
    chosen = part(static)
    assert chosen.layout == SeqLayout((3,), (2,), 5)
    assert chosen.rows["a"].tolist() == [2] and chosen.shared["b"].tolist() == [9]
    assert Static.cat([static.narrow(0, 1), chosen]).layout == layout
