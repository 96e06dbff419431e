"""One picture that shows many, each with a label. Called by `kdit generate` when it makes several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

CELL, MIN_CELL, GAP = 320, 96, 8  # pixels: longest side of a picture, narrowest cell, space between two
FONT_SIZE, LINE = 14, 18
WHITE, INK = (255, 255, 255), (32, 32, 32)


def contact_sheet(pictures: Sequence[Tensor], labels: Sequence[Sequence[str]]) -> Tensor:
    """uint8 pictures [H, W, 3] of any sizes, and lines of text for each -> one uint8 picture [H', W', 3].

    Row by row, as square as the number allows; larger pictures are scaled down. A line that is too long ends in dots;
    one that the built-in font (Latin letters) cannot draw is left out.
    """
    from PIL import Image, ImageDraw, ImageFont

    assert pictures and len(pictures) == len(labels), (len(pictures), len(labels))
    images = [Image.fromarray(picture.contiguous().numpy()) for picture in pictures]
    for image in images:
        image.thumbnail((CELL, CELL), Image.Resampling.LANCZOS)
    cell = max(MIN_CELL, *(image.width for image in images)), max(image.height for image in images)
    columns = math.ceil(math.sqrt(len(images)))
    num_lines = max(len(lines) for lines in labels)
    step = cell[0] + GAP, cell[1] + num_lines * LINE + GAP
    size = GAP + columns * step[0], GAP + math.ceil(len(images) / columns) * step[1]
    sheet = Image.new("RGB", size, WHITE)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(FONT_SIZE)
    for i, (image, lines) in enumerate(zip(images, labels, strict=True)):
        left, top = GAP + i % columns * step[0], GAP + i // columns * step[1]
        sheet.paste(image, (left, top))
        for n, line in enumerate(lines):
            text = _shortened(line, cell[0], draw, font)
            draw.text((left, top + cell[1] + n * LINE + 2), text, fill=INK, font=font)
    return torch.frombuffer(bytearray(sheet.tobytes()), dtype=torch.uint8).view(sheet.height, sheet.width, 3)


def _shortened(line: str, width: int, draw: ImageDraw, font: FreeTypeFont | ImageFont) -> str:
    line = " ".join(line.split())
    try:
        line.encode("latin-1")
    except UnicodeEncodeError:
        return ""
    if draw.textlength(line, font=font) <= width:
        return line
    low, high = 0, min(len(line), width)  # no letter is narrower than a pixel
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if draw.textlength(line[:middle] + "...", font=font) <= width else (low, middle - 1)
    return line[:low].rstrip() + "..."
