"""Python's cycle collector, paused while libraries are imported and models are built. Used by all that load."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_depth = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic search for reference cycles inside; the setting found at the start holds again at the end.

    Importing torch and reading a tokenizer allocate hundreds of thousands of objects that live on. Each few hundred of
    them start a search, the large ones over everything alive: half the time of loading a small model. Sections nest
    and may overlap between threads; the last one to end restores the setting.
    """
    global _depth, _was_enabled
    with _lock:
        if _depth == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and _was_enabled:
                gc.enable()
