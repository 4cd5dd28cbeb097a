"""How many crashes of workers each line was in.

When an engine dies, any line that it had may be the reason. A line in several crashes is a
suspect: it waits until all others have ended, and runs again alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..request import line_request_id

# A line in so many crashes is a suspect. In two more, alone, and it is the reason: one may
# be a coincidence, such as a machine that is gone.
SUSPECT_AFTER = 2
MOST_DEATHS = SUSPECT_AFTER + 2


class CrashCounts:
    """Crashes by line. Lines are named by the ids of their requests."""

    def __init__(self) -> None:
        self._deaths: Counter[str] = Counter()

    def __getitem__(self, rid: str) -> int:
        return self._deaths[line_request_id(rid)]

    def add(self, rids: Iterable[str]) -> None:
        """An engine died that had these lines. It may be one that has just joined, too."""
        self._deaths.update(map(line_request_id, rids))

    def is_suspect(self, rid: str) -> bool:
        """Whether a line must run alone."""
        return self[rid] >= SUSPECT_AFTER

    def is_reason(self, rid: str) -> bool:
        """Whether a line must not run any more."""
        return self[rid] >= MOST_DEATHS

    def explain(self, rids: list[str]) -> bool:
        """Whether these are one line, which is a suspect: it is the reason, not the engine."""
        return len(rids) == 1 and self.is_suspect(rids[0])

    def forget(self, job_id: str) -> None:
        """A job has ended."""
        for rid in [rid for rid in self._deaths if rid.startswith(f"{job_id}-")]:
            del self._deaths[rid]
