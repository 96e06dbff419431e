"""What must be set before diffusers and transformers are imported; run when the package is."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import suppress

QUIET_AND_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DIFFUSERS_VERBOSITY": "error",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}

_kept_libraries: list[object] = []


def prepare() -> None:
    """Keep the libraries quiet and off the network, and torchvision, where there is one, importable."""
    for name, value in QUIET_AND_OFFLINE.items():
        os.environ.setdefault(name, value)
    if importlib.util.find_spec("torchvision") is not None:
        _allow_torchvision_without_operators()

    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()


def _allow_torchvision_without_operators() -> None:
    """Let a torchvision build whose C++ operators do not load beside a CPU-only torch be imported.

    The vision-language processors of transformers need torchvision's resize, which is plain torch
    code; only the detection operators live in the C++ library, and none of them is used here.
    """
    import torch

    try:
        import torchvision
    except RuntimeError:
        for name in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            with suppress(RuntimeError):
                library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept_libraries.append(library)  # the definitions live as long as it does
        import torchvision  # noqa: F401
