"""Tensors that a caller feeds into the graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdit import (
    InputError,
    Pipeline,
    TensorKey,
)
from tests.pipelines.small import CFG, make, runtime, start

NOISE_SHAPE = (1, 4, 6, 4)


def test_noise_is_fed_as_drawn_or_packed(dev: Pipeline) -> None:
    noise = torch.randn(1, 4, 6, 4, generator=torch.Generator().manual_seed(3))
    packed = dev.family.latents.to_public(noise)
    for fed in (noise, packed):
        result = make(dev, feeds={TensorKey.NOISE: fed}, runtime_config=runtime(seed=99))
        assert torch.equal(result.latents, make(dev).latents)
    with pytest.raises(InputError, match=r"\(1, 4, 6, 6\), expected \[B, 6, 16\] or \[B, 4, 6, 4\]"):
        make(dev, feeds={TensorKey.NOISE: torch.zeros(1, 4, 6, 6)})
    with pytest.raises(InputError, match="NOISE must be one tensor, got a list of 1"):
        make(dev, feeds={TensorKey.NOISE: [noise]})


def test_embeddings_can_come_from_outside(dev: Pipeline) -> None:
    arguments = dict(
        prompt_negative="blurry",
        sample_config=CFG,
        runtime_config=runtime(),
        hold=(TensorKey.POSITIVE, TensorKey.NEGATIVE),
    )
    with start(dev, "a red fox", **arguments) as run:  # type: ignore[arg-type]
        held = {key: run.fetch(key) for key in (TensorKey.POSITIVE, TensorKey.NEGATIVE)}
    result = make(dev, "told, not read", feeds=held, sample_config=CFG)
    assert "text_encode" not in result.timings  # nobody needs the encoders any more
    assert torch.equal(result.latents, make(dev, prompt_negative="blurry", sample_config=CFG).latents)
    positive = {TensorKey.POSITIVE: held[TensorKey.POSITIVE]}
    assert torch.equal(make(dev, "x", feeds=positive).latents, make(dev).latents)
    with pytest.raises(InputError, match="POSITIVE holds 1 samples, expected 2"):
        make(dev, ["a", "b"], feeds=positive)


def test_an_unused_negative_feed_is_told(dev: Pipeline) -> None:
    result = make(dev, feeds={TensorKey.NEGATIVE: [torch.zeros(1, 12, 56), torch.zeros(1, 96)]})
    assert "NEGATIVE was fed" in result.notices[0] and torch.equal(result.latents, make(dev).latents)


def test_latents_can_be_decoded_alone(dev: Pipeline) -> None:
    made = make(dev)
    decoded = make(dev, feeds={TensorKey.LATENTS: made.latents})
    assert made.pixels is not None and decoded.pixels is not None
    assert torch.equal(decoded.pixels, made.pixels) and "denoise" not in decoded.timings
    assert (decoded.settings["steps"], decoded.settings["fed"]) == (0, ["latents"])
    assert (made.settings["steps"], made.settings["fed"]) == (2, [])


def test_a_feed_that_nobody_reads_is_refused(dev: Pipeline) -> None:
    with pytest.raises(InputError, match="START_IMG"):
        make(dev, feeds={TensorKey.START_IMG: torch.zeros(1)})


@pytest.mark.parametrize(
    ("feeds", "told"),
    [
        ({"NOISE": torch.zeros(NOISE_SHAPE)}, "keys are TensorKey members, got 'NOISE'"),
        ({TensorKey.NOISE: np.zeros(NOISE_SHAPE)}, "must be a tensor or a list of tensors, got ndarray"),
        ({TensorKey.NOISE: None}, "got NoneType"),
        (
            {TensorKey.NOISE: torch.zeros(NOISE_SHAPE, dtype=torch.int64)},
            "dense floating-point values, got torch.int64",
        ),
        ({TensorKey.NOISE: torch.zeros(NOISE_SHAPE, device="meta")}, "on meta"),
        ({TensorKey.NOISE: torch.full(NOISE_SHAPE, float("nan"))}, "NOISE holds NaN"),
        ({TensorKey.NOISE: torch.zeros(2, 4, 6, 4)}, "NOISE holds 2 samples, expected 1"),
        ({TensorKey.LATENTS: torch.zeros(2, 6, 16)}, "LATENTS holds 2 samples, expected 1"),
        ({TensorKey.BASE_LATENT: torch.ones(NOISE_SHAPE)}, "only its shape is read"),
        ({TensorKey.AUX_LATENT: torch.zeros(1)}, r"FLUX\.1 takes no AUX_LATENT"),
        ({TensorKey.VACE_CONTEXT: torch.zeros(1)}, r"FLUX\.1 takes no VACE_CONTEXT"),
        ({TensorKey.POSITIVE: [torch.zeros(1, 12, 57), torch.zeros(1, 96)]}, r"\[B, L, 56\].*\(1, 12, 57\)"),
        ({TensorKey.POSITIVE: torch.zeros(1, 12, 56)}, "CLIP pooled"),
        ({TensorKey.POSITIVE: torch.zeros(())}, "POSITIVE holds no samples, expected 1"),
    ],
)
def test_a_feed_that_would_be_ignored_or_cannot_be_used_is_refused(
    dev: Pipeline, feeds: dict[TensorKey, torch.Tensor], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        make(dev, feeds=feeds)


def test_branches_that_share_a_forward_must_agree(dev: Pipeline) -> None:
    negative = {TensorKey.NEGATIVE: [torch.zeros(1, 11, 56), torch.zeros(1, 96)]}
    with pytest.raises(InputError, match=r"POSITIVE and NEGATIVE differ in txt: \(1, 12, 56\) and \(1, 11, 56\)"):
        make(dev, feeds=negative, sample_config=CFG)


@pytest.mark.parametrize("key", [TensorKey.IMAGE, TensorKey.MASK, TensorKey.START_IMG, TensorKey.VACE_CONTEXT])
def test_a_fed_tensor_that_is_not_read_is_refused(dev: Pipeline, key: TensorKey) -> None:
    """The result, which would be replaced, and inputs that this request has no use for."""
    with pytest.raises(InputError, match=key.name):
        make(dev, feeds={key: torch.zeros(1, 64, 64, 1 if key is TensorKey.MASK else 3)})
