"""CancelToken: how another thread or a signal handler stops a request between two steps."""

import threading


class CancelToken:
    """Set once; never cleared."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Ask the request to stop before its next step."""
        self._event.set()

    @property
    def is_set(self) -> bool:
        """Whether it was asked to stop."""
        return self._event.is_set()
