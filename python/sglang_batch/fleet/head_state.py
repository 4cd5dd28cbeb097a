"""The state that one head of a fleet leaves to the next one of the same job.

When an engine dies, any line that it had may be the reason, so the crashes of each line are
counted. A line in several crashes is a suspect: it waits until all others have ended, and runs
again alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import StoreError
from ..request import line_request_id
from ..store.files import atomic_write


@dataclass(frozen=True, slots=True)
class HeadState:
    """A start of a head.

    job_id: the same for all heads of a job.
    epoch: higher than that of any earlier head.
    crashes: of lines, kept in its directory.
    """

    job_id: str
    epoch: int
    crashes: CrashCounts


# A line in so many crashes is a suspect. In two more, alone, and it is the reason: one may
# be a coincidence, such as a machine that is gone.
SUSPECT_AFTER = 2
MOST_DEATHS = SUSPECT_AFTER + 2
# The name of the file that keeps them.
CRASHES = "crashes.json"


class CrashCounts:
    """Crashes by line. Lines are named by the ids of their requests.

    Args:
        path: where they are kept for the next head of the job. None: nowhere.

    Raises:
        StoreError: the file cannot be read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._deaths: Counter[str] = Counter()
        if path is None or not path.exists():
            return
        try:
            found = msgspec.json.decode(path.read_bytes(), type=dict[str, int])
            self._deaths.update(found)
        except (OSError, msgspec.MsgspecError) as error:
            raise StoreError(
                f"{path} cannot be read ({error}); remove it to try lines again that "
                "engines died of."
            ) from None

    def __getitem__(self, rid: str) -> int:
        return self._deaths[line_request_id(rid)]

    def add(self, rids: Iterable[str]) -> None:
        """An engine died that had these lines. It may be one that has just joined, too."""
        self._deaths.update(map(line_request_id, rids))
        if self._path is not None:
            with atomic_write(self._path) as file:
                file.write(json.dumps(self._deaths).encode())

    def is_suspect(self, rid: str) -> bool:
        """Whether a line must run alone."""
        return self[rid] >= SUSPECT_AFTER

    def is_reason(self, rid: str) -> bool:
        """Whether a line must not run any more."""
        return self[rid] >= MOST_DEATHS

    def explain(self, rids: list[str]) -> bool:
        """Whether these are one line, which is a suspect: it is the reason, not the engine."""
        return len(rids) == 1 and self.is_suspect(rids[0])
