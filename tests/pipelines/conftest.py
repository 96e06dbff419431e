"""Pipelines over the tiny reference checkpoints, loaded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kdit import Pipeline


@pytest.fixture(scope="session")
def dev_folder(reference_family: Callable[[str], Path]) -> Path:
    return reference_family("flux_dev") / "model"


@pytest.fixture(scope="session")
def dev(dev_folder: Path) -> Pipeline:
    return Pipeline.from_models(dev_folder)


@pytest.fixture(scope="session")
def schnell(reference_family: Callable[[str], Path]) -> Pipeline:
    return Pipeline.from_models(reference_family("flux_schnell") / "model")


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., str]:
    """Writes an array, or random pixels of a size, and gives the path."""

    def write(name: str, pixels: np.ndarray | tuple[int, int], seed: int = 0) -> str:
        if isinstance(pixels, tuple):
            width, height = pixels
            pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
        return str(tmp_path / name)

    return write


@pytest.fixture(autouse=True)
def no_tensor_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does, finished, failed and cancelled runs leave nothing in the pools."""
    yield
    from kdit.engine.engine import Engine

    if Engine._default is not None:
        assert Engine.get_default().tensor_keys() == ()
