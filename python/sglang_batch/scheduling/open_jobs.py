"""The open jobs of one scheduler, and the order in which their requests join."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .job_state import JobState


class OpenJobs:
    """Jobs by id, in the order in which they were opened.

    Attributes:
        each: the jobs; quicker to iterate over than this object itself.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, JobState] = {}
        self.each = self._jobs.values()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[JobState]:
        return iter(self.each)

    def get(self, job_id: str) -> JobState | None:
        return self._jobs.get(job_id)

    def add(self, job: JobState) -> None:
        self._jobs[job.job_id] = job

    def remove(self, job: JobState) -> None:
        del self._jobs[job.job_id]

    def in_order(self) -> Iterable[JobState]:
        """The jobs, first the one whose requests join first.

        Jobs are ordered by priority. Among equals, the job that was served least comes
        first, so that each gets the same share. An order taken from both ends is
        different: it balances everything that runs, so two such jobs would hold each
        other back. They run one after the other.
        """
        if len(self._jobs) < 2:
            return self.each
        return sorted(
            self.each, key=lambda job: (-job.priority, 0 if job.dual else job.served)
        )

    def set_priority(self, job: JobState, priority: int) -> None:
        """Change a job's priority. From now on it gets the same share as its new peers;
        it does not catch up with what they were served before."""
        job.priority = priority
        peers = [
            other.served
            for other in self.each
            if other is not job and other.priority == priority
        ]
        job.served = min(peers, default=job.served)

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
    def idle_tokens(self) -> int:
        """Tokens of shared prefixes that are pinned for later requests only."""
        return sum(job.uses.idle_tokens for job in self.each)
