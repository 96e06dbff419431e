"""Sizes that follow from input pictures where a request states none. Called by families' default_size."""

from __future__ import annotations

import math
from itertools import product

from kdit.media.image_reader import image_size

MEGAPIXEL = 1024 * 1024


def size_like(path: str, multiple: int, *, area: int = MEGAPIXEL, enlarge: bool = False) -> tuple[int, int]:
    """(width, height) in multiples of ``multiple``, shaped as the picture in ``path``: its own size, brought to
    ``area`` pixels if it has more or, with ``enlarge``, in any case. Of the multiples next to it those that change its
    shape least. Raises InputError for a file that is no picture.
    """
    width, height = image_size(path)
    if enlarge or width * height > area:
        return size_of_area(width / height, area, multiple)

    def stretch(size: tuple[int, int]) -> tuple[float, int]:
        return abs(math.log(size[0] * height / (size[1] * width))), abs(size[0] * size[1] - width * height)

    return min(product(_around(width, multiple), _around(height, multiple)), key=stretch)


def _around(length: int, multiple: int) -> tuple[int, ...]:
    """The multiples next to ``length``: itself, or one below and one above it."""
    below = length // multiple * multiple
    return (below,) if below == length else tuple(n for n in (below, below + multiple) if n)


def size_of_area(aspect: float, area: int, multiple: int) -> tuple[int, int]:
    """(width, height) of at most ``area`` pixels with width / height near ``aspect``, rounded as diffusers rounds."""
    width, height = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
    return max(multiple, width // multiple * multiple), max(multiple, height // multiple * multiple)
