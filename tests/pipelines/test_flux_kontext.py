"""FLUX.1 Kontext: references of any sizes and numbers, and the size that follows from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kdit import InputError, Pipeline, TensorKey
from kdit.pipelines.context_builders.flux import (
    FluxKontextExtraInputs,
)
from kdit.pipelines.extra_inputs import MediaInputs
from tests.pipelines.flux_images import SIZE, difference, levels, make

ReferenceFamily = Callable[[str], Path]


@pytest.fixture(scope="module")
def kontext(reference_family: ReferenceFamily) -> Pipeline:
    return Pipeline.from_models(reference_family("flux_kontext") / "model")


def own_size(**inputs: object) -> FluxKontextExtraInputs:
    return FluxKontextExtraInputs(auto_resize=False, **inputs)  # type: ignore[arg-type]


def test_references_of_any_sizes_and_numbers_for_each_prompt(kontext: Pipeline, save: Callable[..., str]) -> None:
    """Every sample is what it is alone, whatever its neighbours refer to."""
    a, b, c = save("a.png", (64, 48)), save("b.png", (32, 80), 1), save("c.png", (50, 33), 2)
    lists, prompts = [[a], [b, c], []], ["a red fox", "two boats", "a kite"]
    together = make(kontext, own_size(image_paths=lists), prompt=prompts).latents
    for i, (own, prompt) in enumerate(zip(lists, prompts, strict=True)):
        alone = make(kontext, own_size(image_paths=own), prompt=prompt, seed=3 + i).latents
        assert difference(together[i : i + 1], alone) < 1e-6
    for other in (own_size(image_paths=[b]), own_size(image_paths=[c, b]), None):
        changed = make(kontext, other, prompt="two boats", seed=4).latents
        assert difference(changed, together[1:2]) > 1e-3


def test_a_reference_for_every_prompt(kontext: Pipeline, save: Callable[..., str]) -> None:
    path, prompts = save("a.png", (64, 48)), ["a red fox", "two boats"]
    shared = make(kontext, own_size(image_paths=path), prompt=prompts).latents
    assert torch.equal(shared, make(kontext, own_size(image_paths=[path]), prompt=prompts).latents)
    assert torch.equal(shared, make(kontext, own_size(image_paths=[[path], [path]]), prompt=prompts).latents)
    with pytest.raises(InputError, match=r"one list of files for each of 2 prompts; got 0 files and 1 lists"):
        make(kontext, own_size(image_paths=[[path]]), prompt=prompts)
    with pytest.raises(InputError, match=r"got 1 files and 1 lists"):
        make(kontext, own_size(image_paths=[[path], path]), prompt=prompts)


def test_the_shape_of_the_reference_decides_the_size(kontext: Pipeline, save: Callable[..., str]) -> None:
    """A checkerboard of an unusual shape is neither cropped nor zoomed: the result has its shape."""
    board = (np.indices((152, 104)).sum(0) % 2 * 255).astype(np.uint8)
    path = save("board.png", np.repeat(board[..., None], 3, axis=2))
    extra = own_size(image_paths=path, max_area=64 * 64)
    result = make(kontext, extra, size=None, steps=1)
    assert result.settings["size"] == [48, 64] and levels(result).shape == (1, 64, 48, 3)
    assert make(kontext, extra, steps=1).settings["size"] == list(SIZE)
    usual = kontext.request("x", extra_inputs=FluxKontextExtraInputs(image_paths=path))
    assert usual.inputs.runtime_config.size == (832, 1232)
    with pytest.raises(InputError, match="max_area` must be a number of pixels, got 0"):
        FluxKontextExtraInputs(max_area=0)


def test_fed_references(kontext: Pipeline, save: Callable[..., str]) -> None:
    latents = [torch.randn(1, 4, 4, 6, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    prompts = ["a red fox", "two boats"]
    both = make(kontext, None, prompt=prompts, feeds={TensorKey.AUX_LATENT: latents}).latents
    second = make(kontext, None, prompt="two boats", seed=4, feeds={TensorKey.AUX_LATENT: latents[1:]}).latents
    assert difference(both[1:], second) < 1e-6
    with pytest.raises(InputError, match="AUX_LATENT holds 2 latents for 3 samples"):
        make(kontext, None, prompt=["a", "b", "c"], feeds={TensorKey.AUX_LATENT: latents})
    with pytest.raises(InputError, match=r"latents \[1, 4, h, w\] of even height and width, got \(1, 4, 3, 6\)"):
        make(kontext, None, feeds={TensorKey.AUX_LATENT: torch.zeros(1, 4, 3, 6)})
    with pytest.raises(InputError, match=r"AUX_LATENT is fed, so `extra_inputs\.image_paths` would not be read"):
        make(kontext, own_size(image_paths=save("a.png", SIZE)), feeds={TensorKey.AUX_LATENT: latents[:1]})


def test_files_of_a_command_line(kontext: Pipeline) -> None:
    two = MediaInputs(images=("a.png", "b.png"))
    assert kontext.family.take_media(two) == FluxKontextExtraInputs(image_paths=["a.png", "b.png"])
    with pytest.raises(InputError, match=r"FLUX\.1 Kontext takes no `mask`; it takes `images`"):
        kontext.family.take_media(MediaInputs(mask="m.png"))
