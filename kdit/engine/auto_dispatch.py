"""auto_dispatch: turns an Executor command into an Engine method that runs it on every executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kdit.executor.executor import Executor

P = ParamSpec("P")
R = TypeVar("R")


class HasExecutors(Protocol):
    """What auto_dispatch needs of an Engine."""

    @property
    def executors(self) -> Sequence[Executor]:
        """All executors, in rank order."""


def auto_dispatch(command: Callable[Concatenate[Executor, P], R]) -> Callable[Concatenate[HasExecutors, P], R]:
    """An Engine method with the name and signature of ``command``; its result is that of rank 0.

    Every executor is called, also after one has failed, so that all ranks see the same commands; the
    error of the first rank is raised at the end.
    """

    def dispatch(engine: HasExecutors, /, *args: P.args, **kwargs: P.kwargs) -> R:
        results: list[R] = []
        errors: list[Exception] = []
        for executor in engine.executors:
            try:
                results.append(getattr(executor, command.__name__)(*args, **kwargs))
            except Exception as error:  # noqa: BLE001  an agreed status, raised below
                errors.append(error)
        if errors:
            raise errors[0]
        return results[0]

    update_wrapper(dispatch, command)
    return dispatch
