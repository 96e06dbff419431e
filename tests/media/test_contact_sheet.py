"""The picture that shows many."""

import torch
from torch import Tensor

from kdit.media.contact_sheet import CELL, GAP, LINE, contact_sheet


def plain(width: int, height: int, *colour: int) -> Tensor:
    return torch.tensor(colour, dtype=torch.uint8).expand(height, width, 3)


def test_pictures_stand_in_rows_with_their_labels_below() -> None:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    sheet = contact_sheet([plain(100, 50, *c) for c in colours], [(f"{i}", "a fox") for i in range(3)])
    step_x, step_y = 100 + GAP, 50 + 2 * LINE + GAP
    assert sheet.dtype is torch.uint8 and sheet.shape == (GAP + 2 * step_y, GAP + 2 * step_x, 3)
    for i, colour in enumerate(colours):
        top, left = GAP + i // 2 * step_y, GAP + i % 2 * step_x
        assert torch.equal(sheet[top : top + 50, left : left + 100], plain(100, 50, *colour))
        assert sheet[top + 50 : top + 50 + 2 * LINE, left : left + 100].min() < 100  # ink
    assert sheet[GAP + step_y :, GAP + step_x :].min() == 255  # the fourth place is empty


def test_large_pictures_are_scaled_and_small_ones_are_not() -> None:
    sheet = contact_sheet([plain(2000, 1000, 0, 0, 0), plain(10, 10, 0, 0, 0)], [("a",), ("b",)])
    assert sheet.shape[1] == GAP + 2 * (CELL + GAP)
    black = (sheet[: GAP + CELL // 2] == 0).all(-1)
    assert black.sum() == CELL * CELL // 2 + 100


def test_a_long_line_is_cut_and_unknown_letters_are_left_out() -> None:
    picture = plain(120, 8, 255, 255, 255)
    shown = {
        name: contact_sheet([picture], [(line,)])
        for name, line in {"empty": "", "cut": "heart " * 500, "other": "heart " * 400, "letters": "狐の絵"}.items()
    }
    assert len({sheet.shape for sheet in shown.values()}) == 1
    assert torch.equal(shown["letters"], shown["empty"])
    assert torch.equal(shown["cut"], shown["other"]) and shown["cut"].min() < 100
    assert shown["cut"][:, -GAP:].min() == 255


def test_lines_of_a_prompt_become_one() -> None:
    picture = plain(120, 8, 255, 255, 255)
    assert torch.equal(contact_sheet([picture], [("a\n fox",)]), contact_sheet([picture], [("a fox",)]))
