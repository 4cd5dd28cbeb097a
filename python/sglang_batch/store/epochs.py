"""A number for each start of a head, higher than those of all earlier ones."""

from __future__ import annotations

import time
from pathlib import Path

from .files import atomic_write

NAME = "epoch"


def next_epoch(directory: Path) -> int:
    """The epoch of a head that keeps its state in ``directory``, written there.

    Workers may know of heads with other directories. By the clock, this one is later.
    """
    path = directory / NAME
    last = int(path.read_bytes()) if path.exists() else 0
    epoch = max(last + 1, int(time.time()))
    with atomic_write(path) as file:
        file.write(str(epoch).encode())
    return epoch
