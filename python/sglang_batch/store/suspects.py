"""Lines of one batch that may have taken the engine down, kept across restarts.

When an engine dies, any line that it had in flight may be the reason. These suspects
run again after all other lines, alone in the engine: one at a time, or in groups first
if there are many. A line that is alone when the engine dies is the reason. If online
requests were running too, it is taken for the reason only the second time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from .files import atomic_write

# How a line runs again, from least to most suspect.
IN_GROUPS, ALONE, ALONE_AGAIN, NEVER = 1, 2, 3, 4
# The most lines that run one at a time without running in groups first.
FEW = 64


class Suspects:
    """The suspects, how each runs again, and how often the engine died."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_deaths = 0
        self._how: dict[int, int] = {}
        if path.exists():
            kept = json.loads(path.read_bytes())
            self.num_deaths = kept["num_deaths"]
            self._how = {int(index): how for index, how in kept["lines"].items()}

    def blame(
        self, in_flight: Iterable[int], num_lines: int, num_others: int = 0
    ) -> None:
        """Record that the engine died with these lines, of ``num_lines``, and others."""
        self.num_deaths += 1
        for index in in_flight:
            how = self._how.get(index)
            if num_lines == 1 and how in (ALONE, ALONE_AGAIN):
                sure = not num_others or how == ALONE_AGAIN
                self._how[index] = NEVER if sure else ALONE_AGAIN
            elif num_lines <= FEW or how is not None:
                self._how[index] = max(ALONE, how or ALONE)
            else:
                self._how[index] = IN_GROUPS
        with atomic_write(self._path) as file:
            kept = {"num_deaths": self.num_deaths, "lines": self._how}
            file.write(json.dumps(kept).encode())

    def never(self) -> list[int]:
        """Lines that must not run again, ascending."""
        return self._of(NEVER)

    def groups(self) -> list[list[int]]:
        """Groups of lines. Each group runs alone in the engine."""
        many = self._of(IN_GROUPS)
        size = max(1, round(len(many) ** 0.5))
        groups = [many[at : at + size] for at in range(0, len(many), size)]
        alone = self._of(ALONE) + self._of(ALONE_AGAIN)
        return groups + [[index] for index in sorted(alone)]

    def _of(self, how: int) -> list[int]:
        return sorted(index for index, one in self._how.items() if one == how)
