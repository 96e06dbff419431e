"""Settings refuse wrong values where they are made, and name the field and the value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction

import pytest

from kdit import (
    ConfigError,
    ExecuteConfig,
    FileOptions,
    FirstBlockCacheConfig,
    HybridCacheConfig,
    ParallelConfig,
    QuantizeConfig,
    RuntimeConfig,
    SampleConfig,
    TeaCacheConfig,
)
from kdit.config.runtime_config import frame_rate


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: SampleConfig(steps=0), r"SampleConfig\.steps` .* got 0"),
        (lambda: SampleConfig(steps=2.0), r"SampleConfig\.steps` .* got 2\.0"),
        (lambda: SampleConfig(steps=True), "got True"),
        (lambda: SampleConfig(max_sequence_length=-1), "max_sequence_length"),
        (lambda: SampleConfig(guidance_scale=-0.5), r"guidance_scale` .* got -0\.5"),
        (lambda: SampleConfig(cfg_scale=float("nan")), r"cfg_scale` .* got nan"),
        (lambda: SampleConfig(cfg_scale_2="4"), "cfg_scale_2` .* got '4'"),
        (lambda: SampleConfig(on_long_prompt="drop"), "on_long_prompt"),
        (lambda: RuntimeConfig(seed=-1), "seed` .* got -1"),
        (lambda: RuntimeConfig(seed=2**63), "seed"),
        (lambda: RuntimeConfig(seed=()), "empty tuple"),
        (lambda: RuntimeConfig(seed=(1, "2")), "got '2'"),
        (lambda: RuntimeConfig(size=(0, 16)), r"size` .* got \(0, 16\)"),
        (lambda: RuntimeConfig(size=(16,)), "size"),
        (lambda: RuntimeConfig(size=(16.0, 16)), "size"),
        (lambda: RuntimeConfig(size="16x16"), "size"),
        (lambda: RuntimeConfig(frame_num=0), "frame_num"),
        (lambda: RuntimeConfig(output_type="video"), "output_type"),
        (lambda: RuntimeConfig(file_options={"crf": 3}), "file_options` must be a FileOptions"),
        *(
            (lambda value=value: FileOptions(quality=value), r"FileOptions\.quality` must be a whole .* from 1 to 100")
            for value in (0, 101, -1, True, 2.5, "high")
        ),
        *(
            (lambda value=value: FileOptions(crf=value), r"crf` must be a whole .* from 0 to 51")
            for value in (-1, 52, 1.0)
        ),
        (lambda: FileOptions(pixel_format="yuvj420p"), "pixel_format` must be yuv420p or yuv444p, got 'yuvj420p'"),
        (lambda: ExecuteConfig(dtype="fp16"), "dtype must be one of float32, bfloat16, float16, got 'fp16'"),
        (lambda: ExecuteConfig(component_dtypes={"vae": "half"}), "vae: dtype"),
        (lambda: ExecuteConfig(modulation="both"), "modulation"),
        (lambda: ExecuteConfig(attention="flash"), "attention"),
        (lambda: QuantizeConfig(sage_attn_type="best"), "sage_attn_type"),
        (lambda: ParallelConfig(tp=0), r"ParallelConfig\.tp .* got 0"),
        (lambda: ParallelConfig(cfg=3), "cfg must be 1 or 2"),
        (lambda: ParallelConfig(tp=2, vae=3), "vae = 3 does not divide the 2 ranks"),
        (lambda: FirstBlockCacheConfig(residual_diff_threshold=-1), "residual_diff_threshold"),
        (lambda: FirstBlockCacheConfig(downsample_factor=0), "downsample_factor"),
        (lambda: HybridCacheConfig(order=3), "order"),
        (lambda: TeaCacheConfig(threshold=-0.1), "threshold"),
    ],
)
def test_wrong_values_are_refused(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make()
    with pytest.raises(ValueError, match=told):  # the builtin that callers expect
        make()


def test_zero_is_a_value_and_none_is_not_given() -> None:
    assert FileOptions(crf=0).given() == {"crf": 0} and FileOptions().given() == {}
    assert RuntimeConfig(seed=0).seed == 0 and SampleConfig(guidance_scale=0, cfg_scale=0).cfg_scale == 0
    for config in (SampleConfig(), RuntimeConfig()):
        given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.default is None}
        assert given and all(value is None for value in given.values())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (24, Fraction(24)),
        ("24", Fraction(24)),
        (23.976, Fraction(24000, 1001)),
        ("23.98", Fraction(24000, 1001)),
        (29.97, Fraction(30000, 1001)),
        (59.94, Fraction(60000, 1001)),
        ("24000/1001", Fraction(24000, 1001)),
        (12.5, Fraction(25, 2)),
        (Fraction(1, 3), Fraction(1, 3)),
    ],
)
def test_frame_rates_are_exact(given: int | float | str | Fraction, expected: Fraction) -> None:
    assert frame_rate(given) == expected


@pytest.mark.parametrize("fps", [0, -1, 1001, "fast", "1/0", float("nan"), float("inf"), True, None])
def test_what_is_no_frame_rate_is_refused(fps: object) -> None:
    with pytest.raises(ConfigError, match="`fps` must be"):
        frame_rate(fps)  # type: ignore[arg-type]


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SampleConfig().steps = 3  # type: ignore[misc]


def test_axes_multiply() -> None:
    assert ParallelConfig(dp=2, cfg=2, tp=2, ulysses=3, ring=1, vae=8).world_size == 24
