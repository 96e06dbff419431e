"""Noise schedulers as the published checkpoints configure them."""

from __future__ import annotations

from typing import Any

import diffusers


def flow_match(**options: Any) -> diffusers.FlowMatchEulerDiscreteScheduler:
    return diffusers.FlowMatchEulerDiscreteScheduler(**options)


FLUX_SHIFT = dict(
    use_dynamic_shifting=True, shift=3.0, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096
)
QWEN_SHIFT = dict(
    use_dynamic_shifting=True,
    shift=1.0,
    base_shift=0.5,
    max_shift=0.9,
    base_image_seq_len=256,
    max_image_seq_len=8192,
    shift_terminal=0.02,
    time_shift_type="exponential",
)


def unipc(shift: float) -> diffusers.UniPCMultistepScheduler:
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=shift
    )
