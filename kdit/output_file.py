"""Output files: found out to be writable before the work, and never seen half written."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kdit.errors import OutputError


def check_writable(path: str | Path, suffixes: Collection[str] = (".png",)) -> None:
    """Raise OutputError if ``path`` could not be written, before any work is done for it."""
    target = Path(path)
    if target.suffix.lower() not in suffixes:
        raise OutputError(f"cannot write {str(path)!r}: the name must end in {' or '.join(suffixes)}")
    with _as_output_error(path):
        if target.is_dir():
            raise OutputError(f"cannot write {str(path)!r}: it is a folder")
        if not target.parent.exists():
            raise OutputError(f"cannot write {str(path)!r}: the folder {str(target.parent)!r} does not exist")
        if not target.parent.is_dir():
            raise OutputError(f"cannot write {str(path)!r}: {str(target.parent)!r} is not a folder")
        with tempfile.TemporaryFile(dir=target.parent):  # permission bits do not tell all: read-only disks, quotas
            pass


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write into that appears as ``path`` when the block ends well, and not at all otherwise.

    Raises OutputError if the disk refuses.
    """
    target = Path(os.path.realpath(path))  # a link stays a link
    partial = target.with_name(f".{uuid.uuid4().hex}.tmp")  # the same folder, since a rename must not cross disks
    with _as_output_error(path):
        try:
            with partial.open("xb") as file:
                yield file
            if target.exists():
                shutil.copymode(target, partial)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def _as_output_error(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
