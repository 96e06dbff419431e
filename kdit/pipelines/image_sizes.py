"""Sizes that follow from input pictures where a request states none. Called by families' default_size."""

from __future__ import annotations

from kdit.media.image_reader import image_size

MEGAPIXEL = 1024 * 1024


def size_like(path: str, multiple: int, *, area: int = MEGAPIXEL, enlarge: bool = False) -> tuple[int, int]:
    """(width, height) in multiples of ``multiple``, shaped as the picture in ``path``: its own size, brought to
    ``area`` pixels if it has more or, with ``enlarge``, in any case. Raises InputError for a file that is no picture.
    """
    width, height = image_size(path)
    if enlarge or width * height > area:
        return size_of_area(width / height, area, multiple)
    return max(multiple, round(width / multiple) * multiple), max(multiple, round(height / multiple) * multiple)


def size_of_area(aspect: float, area: int, multiple: int) -> tuple[int, int]:
    """(width, height) of at most ``area`` pixels with width / height near ``aspect``, rounded as diffusers rounds."""
    width, height = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
    return max(multiple, width // multiple * multiple), max(multiple, height // multiple * multiple)
