"""The open jobs of one scheduler, the order in which their requests join, and their common
prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from .job_state import JobState
from .scheduled_request import ScheduledRequest


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
    """Jobs by id, and ``each`` of them in the order in which they were opened."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobState] = {}
        self.each = self._jobs.values()
        self.scan = ScanPace()

    def __len__(self) -> int:
        return len(self._jobs)

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
        """The jobs of each priority, the highest first. Jobs of one priority share the
        engine by work done."""
        if len(self._jobs) == 1:
            return [[*self.each]]
        groups: dict[int, list[JobState]] = {}
        for job in self.each:
            groups.setdefault(job.priority, []).append(job)
        return [groups[priority] for priority in sorted(groups, reverse=True)]

    # Shares of the engine -------------------------------------------------------------

    def arrives(self, job: JobState) -> None:
        """A request of a job arrives, and is added afterwards. A job without waiting
        requests gets no more of the engine, and is not owed it later: it starts again level
        with its peers."""
        if len(self._jobs) > 1 and not job.num_waiting:
            job.done.raise_by(max(0.0, self._level(job) - job.done.done_s))

    def set_priority(self, job: JobState, priority: int) -> None:
        """Change a job's priority. From now on it gets the same share as its new peers; it
        does not catch up with the work that was done for them before."""
        job.priority = priority
        job.done.raise_by(self._level(job) - job.done.done_s)

    def _level(self, job: JobState) -> float:
        """Work done for that peer of a job, with requests here, that has the least. If no
        peer has requests, the most that was done for one: when it has some again, nobody
        has to wait until the job has caught up."""
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
        return sum(job.waiting_tokens for job in self.each)

    @property
    def locked_tokens(self) -> int:
        return sum(job.uses.locked_tokens for job in self.each)

    @property
    def num_locked(self) -> int:
        return sum(job.uses.num_locked for job in self.each)

    @property
    def num_idle(self) -> int:
        return sum(job.uses.num_idle for job in self.each)

    @property
    def idle_tokens(self) -> int:
        return sum(job.uses.idle_tokens for job in self.each)


Digests = Callable[[Any, Sequence[int]], Sequence[bytes]]
"""Of the engine's request: what names its prompt up to each of these depths."""

# Shorter prefixes may be computed by each job.
SHORTEST = 64


class CommonPrefixes:
    """The nodes of all open jobs by their tokens. With a single job nothing is noted.

    Every job has a prefix tree of its own. While a request of one job computes a prefix,
    those of other jobs that begin with the same tokens wait, and once it is in the cache
    they go first. So it is computed once, and used by all before it leaves the cache. What
    follows the prefix may differ by job, such as the question about a document, and so may
    the depths of the nodes, which are compared at a few depths. Nodes are noted when the
    first request below them arrives, since a scheduler knows no tokens of requests to come.
    """

    def __init__(self, jobs: OpenJobs, digests: Digests) -> None:
        self._jobs = jobs
        self._digests = digests
        self._nodes: dict[bytes, dict[JobState, int]] = {}
        # By node: its digests, the deepest first.
        self._digests_of: dict[JobState, dict[int, list[bytes]]] = {}

    def opened(self, job: JobState) -> None:
        """A job was added. With it, those that were open alone are noted, too."""
        job.elsewhere = partial(self._elsewhere, job)
        if len(self._jobs) == 2:
            for each in self._jobs.each:
                self.note_all(each)

    def note_all(self, job: JobState) -> None:
        """Note the prefixes of all requests of a job, unless it is alone."""
        for request in job.requests() if len(self._jobs) > 1 else ():
            self.note(job, request)

    def note(self, job: JobState, request: ScheduledRequest) -> None:
        """Note the prefixes of a request that has arrived."""
        if request.leaf < 0 or len(self._jobs) < 2:
            return
        known = self._digests_of.setdefault(job, {})
        path = job.uses.path(request.node)
        ends = [int(job.uses.depth[node]) for node in path] + [0]
        parts = [
            (node, _places(begin, end))
            for node, begin, end in zip(path, ends[1:], ends[:-1], strict=True)
            if node not in known
        ]
        if not parts:
            return
        places = sorted({place for _, some in parts for place in some})
        digests = dict(zip(places, self._digests(request.req, places), strict=True))
        for node, some in parts:
            known[node] = [digests[place] for place in some]
            for digest in known[node]:
                self._nodes.setdefault(digest, {})[job] = node
            for other, at in self._elsewhere(job, node):
                if (leader := other.uses.computing.get(at)) is not None:
                    job.uses.await_node(node, leader)

    def forget(self, job: JobState) -> None:
        """A job is closed, or will have another tree. Nobody awaits its prefixes now."""
        known = self._digests_of.get(job, {})
        for node in known:
            for other, at in self._elsewhere(job, node):
                other.no_longer_awaits(at, job)
        self._digests_of.pop(job, None)
        for digest in set().union(*known.values()):
            nodes = self._nodes[digest]
            del nodes[job]
            if not nodes:
                del self._nodes[digest]

    def _elsewhere(self, job: JobState, node: int) -> list[tuple[JobState, int]]:
        """The nodes of other jobs that begin with most of the same tokens."""
        for digest in self._digests_of.get(job, {}).get(node, ()):
            nodes = self._nodes[digest]
            if len(nodes) > 1:
                return [(other, at) for other, at in nodes.items() if other is not job]
        return []


def _places(begin: int, end: int) -> list[int]:
    """Where a node's tokens, from ``begin`` to ``end``, are compared: at multiples of a
    power of two, so that nodes of similar lengths have some in common. The deepest is
    first, and none is before the middle: less is not worth waiting for."""
    step = SHORTEST
    while 16 * step <= end - begin:
        step *= 2
    middle = max(begin + 1, (begin + end + 1) // 2)
    return [*range(-(-middle // step) * step, end + 1, step)][::-1]


class BackloggedTokens(NamedTuple):
    """All waiting requests of jobs as one: load reports only add up tokens."""

    seqlen: int
    num_matched_prefix_tokens: int = 0


@dataclass(eq=False)
class WaitingView:
    """SGLang's waiting queue followed by the backlog of all jobs.

    Its length is exact. The backlog is a single item, so iterating costs no more with a
    hundred thousand requests than with ten.
    """

    queue: Sequence[object]
    jobs: OpenJobs
    num_offloaded: int

    def __len__(self) -> int:
        return len(self.queue) + self.jobs.num_waiting + self.num_offloaded

    def __iter__(self) -> Iterator[object]:
        yield from self.queue
        yield BackloggedTokens(self.jobs.waiting_tokens)
