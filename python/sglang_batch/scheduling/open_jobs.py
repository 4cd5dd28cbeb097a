"""The open jobs of one scheduler, and the order in which their requests join."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .job_state import JobState


@dataclass(slots=True)
class ScanPace:
    """State of the dual scanner over all jobs that are taken from both ends.

    pace: see ``planner.admission_rules.dual_scanner.next_pace``.
    left_blocked: whether the left side's next request did not fit.
    saved_tokens: prompt tokens saved up for a step of prompts only.
    ahead_tokens: prompt tokens that were computed beyond the budgets.
    """

    pace: float = 1.0
    left_blocked: bool = False
    saved_tokens: int = 0
    ahead_tokens: int = 0


class OpenJobs:
    """Jobs by id, in the order in which they were opened.

    Attributes:
        each: the jobs; quicker to iterate over than this object itself.
        scan: state of the dual scanner.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, JobState] = {}
        self.each = self._jobs.values()
        self.scan = ScanPace()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[JobState]:
        return iter(self.each)

    def get(self, job_id: str) -> JobState | None:
        return self._jobs.get(job_id)

    def add(self, job: JobState) -> None:
        if not any(other.dual for other in self.each):
            self.scan = ScanPace()
        self._jobs[job.job_id] = job

    def remove(self, job: JobState) -> None:
        del self._jobs[job.job_id]

    def in_order(self) -> Iterable[JobState]:
        """The jobs by priority, and among equals those with the least work first."""
        if len(self._jobs) < 2:
            return self.each
        return sorted(self.each, key=lambda job: (-job.priority, job.done.share_s))

    def by_priority(self) -> list[list[JobState]]:
        """The jobs of each priority, the highest first.

        Jobs of one priority share the engine by work done.
        """
        if len(self._jobs) == 1:
            return [[*self.each]]
        groups: dict[int, list[JobState]] = {}
        for job in self.each:
            groups.setdefault(job.priority, []).append(job)
        return [groups[priority] for priority in sorted(groups, reverse=True)]

    # Shares of the engine -------------------------------------------------------------

    def arrives(self, job: JobState) -> None:
        """A request of a job arrives. Call this before the request is added.

        A job without waiting requests gets no more of the engine, and is not owed it
        later: it starts again level with its peers.
        """
        if len(self._jobs) > 1 and not job.num_waiting:
            job.done.raise_by(max(0.0, self._level(job) - job.done.done_s))

    def set_priority(self, job: JobState, priority: int) -> None:
        """Change a job's priority. From now on it gets the same share as its new peers;
        it does not catch up with the work that was done for them before."""
        job.priority = priority
        job.done.raise_by(self._level(job) - job.done.done_s)

    def _level(self, job: JobState) -> float:
        """Work done for that peer of a job, with requests here, that has the least.

        If no peer has requests, the most that was done for one: when it has some again,
        nobody has to wait until the job has caught up.
        """
        peers = [
            other
            for other in self.each
            if other is not job and other.priority == job.priority
        ]
        busy = [peer.done.done_s for peer in peers if len(peer)]
        if busy:
            return min(busy)
        return max((peer.done.done_s for peer in peers), default=job.done.done_s)

    @property
    def num_waiting(self) -> int:
        """Requests of all jobs that wait, without offloaded ones."""
        return sum(job.num_waiting for job in self.each)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the waiting requests."""
        return sum(job.waiting_tokens for job in self.each)

    @property
    def locked_tokens(self) -> int:
        """Tokens of shared prefixes that running requests use."""
        return sum(job.uses.locked_tokens for job in self.each)

    @property
    def num_locked(self) -> int:
        """Shared prefixes that running requests use."""
        return sum(job.uses.num_locked for job in self.each)

    @property
    def num_idle(self) -> int:
        """Prefixes that are pinned for later requests only."""
        return sum(job.uses.num_idle for job in self.each)

    @property
    def idle_tokens(self) -> int:
        """Tokens of shared prefixes that are pinned for later requests only."""
        return sum(job.uses.idle_tokens for job in self.each)
