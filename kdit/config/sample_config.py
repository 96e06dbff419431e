"""SampleConfig: how the denoising loop samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kdit.config.checks import is_scale, is_whole
from kdit.errors import ConfigError

MAX_STEPS = 10_000  # ten times what the models were trained with; more is a slip of the keyboard


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig:
    """Settings of the sampler. None means "not given": the model's own default applies."""

    steps: int | None = None
    guidance_scale: float | None = None  # embedded guidance of distilled models
    cfg_scale: float | None = None  # classifier-free guidance; 1 or less: one forward per step
    cfg_scale_2: float | None = None  # classifier-free guidance of a second expert
    strength: float | None = None  # image to image: 0 keeps the image, 1 ignores it; None: no image is changed
    max_sequence_length: int | None = None  # text tokens, padding included
    on_long_prompt: Literal["cut", "reject"] = "cut"  # what happens to a prompt that an encoder cannot take whole

    def __post_init__(self) -> None:
        for name, most in (("steps", MAX_STEPS), ("max_sequence_length", None)):
            count = getattr(self, name)
            if count is not None and not is_whole(count, low=1, high=most):
                limit = "of at least 1" if most is None else f"from 1 to {most}"
                raise ConfigError(f"`SampleConfig.{name}` must be a whole number {limit}, got {count!r}")
        for name in ("guidance_scale", "cfg_scale", "cfg_scale_2"):
            scale = getattr(self, name)
            if scale is not None and not is_scale(scale):
                raise ConfigError(f"`SampleConfig.{name}` must be a finite number of at least 0, got {scale!r}")
        if self.strength is not None and not (is_scale(self.strength) and self.strength <= 1):
            raise ConfigError(f"`SampleConfig.strength` must be a number from 0 to 1, got {self.strength!r}")
        if self.on_long_prompt not in ("cut", "reject"):
            raise ConfigError(f'`SampleConfig.on_long_prompt` must be "cut" or "reject", got {self.on_long_prompt!r}')
