"""What the commands tell on stderr, one line each: errors, usage errors and notes. Used by cli/main.py."""

from __future__ import annotations

import errno
import io
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import typer
from typer.core import TyperGroup

from kdit.cli.option_names import with_options
from kdit.errors import Cancelled, CheckpointError, KditError, NonFiniteError

_RUN = re.compile(r"^run-\d+: ")  # says nothing where one request runs
# Its base is click's UsageError, which typer does not export and takes from another module in each version.
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__base__)


def tolerate_any_text() -> None:
    """Make stdout and stderr escape what their encoding lacks: a message must not fail on a prompt."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn a deliberate error into one line on stderr and its exit code. A bug keeps its traceback."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()  # a full disk shows here
    except Cancelled as error:
        _complain(f"kdit: {error}")
        raise typer.Exit(130) from None
    except KeyboardInterrupt:
        _complain("kdit: interrupted")
        raise typer.Exit(130) from None
    except CheckpointError as error:
        _complain(f"kdit: error: {error.args[0]}", table=error.table)
        raise typer.Exit(2) from None
    except KditError as error:
        _complain(f"kdit: error: {error}")
        raise typer.Exit(1 if isinstance(error, NonFiniteError) else 2) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _complain(f"kdit: error: cannot write to standard output: {error.strerror}")
        raise typer.Exit(2) from None


class OneLineGroup(TyperGroup):
    """Tells a usage error as any other error: one line and exit code 2."""

    def parse_args(self, ctx: object, args: list[str]) -> list[str]:
        """Read the options before the command."""
        context = cast(typer.Context, ctx)
        if not args:  # the only "error" is then the help
            return super().parse_args(context, args)
        with _one_line_usage_errors(context):
            return super().parse_args(context, args)

    def invoke(self, ctx: object) -> object:
        """Find the command, read its arguments and run it."""
        context = cast(typer.Context, ctx)
        with _one_line_usage_errors(context):
            return super().invoke(context)


@contextmanager
def _one_line_usage_errors(context: typer.Context) -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        see = " ".join(part for part in ("kdit", context.invoked_subcommand, "--help") if part)
        _complain(f"kdit: error: {error.format_message().strip().rstrip('.')} (see {see})")
        raise typer.Exit(2) from None


@contextmanager
def notes_on_stderr() -> Iterator[None]:
    """Inside, warnings of kdit's loggers are lines on stderr, each shown once."""
    logger, handler = logging.getLogger("kdit"), _NoteHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _NoteHandler(logging.Handler):
    """Looks sys.stderr up for every line: a progress bar puts a stream there that prints above the bar."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        note = _RUN.sub("", record.getMessage())
        if note not in self.shown:
            self.shown.add(note)
            _complain(f"kdit: note: {note}")


def _complain(message: str, *, table: str = "") -> None:
    if sys.stderr is not None:  # None: it was closed, and print would take standard output
        print(" ".join(with_options(message).split()), *table.splitlines(), sep="\n", file=sys.stderr, flush=True)
