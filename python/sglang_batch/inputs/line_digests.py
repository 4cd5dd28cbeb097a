"""Digests of a job's input by line, which tell the lines of a changed input."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..store.files import atomic_write
from .local_input import LocalInput

_DIGEST_BYTES = 8
_PIECE_BYTES = 1 << 20

Digests = NDArray[np.uint64]


def write_digests(path: Path, local: LocalInput) -> None:
    """Write the digests of an input's lines to ``path``: 8 bytes for each line."""
    with atomic_write(path) as file:
        file.write(_digests(local.path).tobytes())


def describe_change(path: Path, local: LocalInput) -> str | None:
    """The lines in which an input differs from the one that ``path`` was written for.

    Returns:
        A phrase such as ``line 17 changed``, or None if there are no digests.
    """
    try:
        before = np.frombuffer(path.read_bytes(), dtype=np.uint64)
    except (OSError, ValueError):
        return None
    now = _digests(local.path)
    if len(before) == len(now):
        changed = np.flatnonzero(before != now)
        if not len(changed):
            return None
        others = f" and {len(changed) - 1:,} more" if len(changed) > 1 else ""
        return f"{local.line_name(int(changed[0]) + 1)}{others} changed"
    same = _num_equal(before, now)
    same_at_end = _num_equal(before[same:][::-1], now[same:][::-1])
    gone, added = (len(each) - same - same_at_end for each in (before, now))
    where = f"after {local.line_name(same)}" if same else "at the beginning"
    if not gone:
        return f"{_lines(added)} added {where}"
    if not added:
        return f"{_lines(gone)} gone {where}"
    return f"{_lines(gone)} {where} replaced by {_lines(added)}"


def _digests(path: Path) -> Digests:
    found = bytearray()
    line = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with open(path, "rb") as file:
        piece = b"\n"
        for piece in iter(partial(file.readline, _PIECE_BYTES), b""):
            line.update(piece.removesuffix(b"\n"))
            if piece.endswith(b"\n"):
                found += line.digest()
                line = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        # A newline added to the last line is no change of it.
        if not piece.endswith(b"\n"):
            found += line.digest()
    return np.frombuffer(found, dtype=np.uint64)


def _num_equal(first: Digests, second: Digests) -> int:
    """How many items two arrays have in common before the first that differs."""
    most = min(len(first), len(second))
    differing = np.flatnonzero(first[:most] != second[:most])
    return int(differing[0]) if len(differing) else most


def _lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count:,} lines"
