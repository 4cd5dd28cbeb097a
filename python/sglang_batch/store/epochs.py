"""A number for each start of a head, higher than those of all earlier ones."""

from __future__ import annotations

import time
from pathlib import Path

from .files import atomic_write

NAME = "epoch"


def epoch_after(last: int) -> int:
    """An epoch above ``last``, and above those of heads that began earlier elsewhere.

    By the clock, in milliseconds: two heads that know nothing of each other should not begin
    in the same one.
    """
    return max(last + 1, time.time_ns() // 1_000_000)


def next_epoch(directory: Path) -> int:
    """The epoch of a head that keeps its state in ``directory``, written there.

    Workers may know of heads with other directories. By the clock, this one is later.
    """
    path = directory / NAME
    last = int(path.read_bytes()) if path.exists() else 0
    epoch = epoch_after(last)
    with atomic_write(path) as file:
        file.write(str(epoch).encode())
    return epoch
