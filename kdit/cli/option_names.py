"""Options of the command line in the place of the fields that messages name. Used by cli/messages.py, results.py.

A message of kdit puts the name of a field between backquotes, alone or after its owner: `size`, `SampleConfig.steps`,
`extra_inputs.mask_path`.
"""

from __future__ import annotations

import re

# field -> option; fields of ExtraInputs that are missing here are given by --extra
OPTIONS = {
    "prompt": "PROMPT",
    "prompt_negative": "--negative",
    "save_paths": "--output",
    "size": "--size",
    "frame_num": "--frames",
    "fps": "--fps",
    "fit": "--fit",
    "seed": "--seed",
    "quality": "--quality",
    "crf": "--crf",
    "pixel_format": "--pixel-format",
    "steps": "--steps",
    "guidance_scale": "--guidance",
    "cfg_scale": "--cfg",
    "cfg_scale_2": "--cfg2",
    "strength": "--strength",
    "max_sequence_length": "--max-sequence-length",
    "on_long_prompt": "--long-prompt",
    "dtype": "--dtype",
    "variant": "--variant",
    "modulation": "--modulation",
    "batch_invariant": "--batch-invariant",
    "device": "--device",
    "images": "--image",
    "image_path": "--image",
    "image_paths": "--image",
    "start_img_path": "--image",
    "last_image": "--last-image",
    "end_img_path": "--last-image",
    "mask": "--mask",
    "mask_path": "--mask",
    "control": "--control",
    "control_path": "--control",
}
_FIELD = re.compile(r"`(?:(\w+)\.)?(\w+)`")


def with_options(message: str) -> str:
    """``message`` with the option in the place of each field that has one."""
    return _FIELD.sub(_option, message)


def _option(found: re.Match[str]) -> str:
    owner, name = found[1] or "", found[2]
    if name in OPTIONS:
        return OPTIONS[name]
    return f"--extra {name}" if owner == "extra_inputs" or owner.endswith("ExtraInputs") else found[0]
