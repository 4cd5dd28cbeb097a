"""What one head of a fleet leaves to the next one of the same job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .crash_counts import CRASHES, CrashCounts


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

    @classmethod
    def begin(cls, job_id: str, directory: Path, epoch: int) -> HeadState:
        """The state of a new head that keeps it in ``directory``.

        Raises:
            StoreError: what the last one left cannot be read.
        """
        crashes = CrashCounts(directory / CRASHES)
        return cls(job_id, epoch, crashes)
