"""Writing files so that a crash leaves the old or the new one, never half a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name only if the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_file(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def move_into_place(source: Path, path: Path) -> None:
    """Move a file on the same disk to its final name, which survives a power cut."""
    sync_file(source)
    os.replace(source, path)
    sync_file(path.parent)


def sync_file(path: Path) -> None:
    """Make the contents of a file, or the names in a directory, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
