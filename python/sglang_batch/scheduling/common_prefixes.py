"""Long prefixes that several open jobs have in common.

Every job has a prefix tree of its own. Nodes of different jobs that begin with the same
tokens are found here. While a request of one job computes such a prefix, those of the
others wait. Once it is in the cache, they go first. So it is computed once, and used by
all jobs before it leaves the cache.

What follows the prefix may differ by job, such as the question about a document, and so
may the depths of the nodes. They are compared at a few depths.

Nodes are noted when the first request below them arrives, since a scheduler knows no
tokens of requests to come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .job_state import JobState
from .open_jobs import OpenJobs
from .scheduled_request import ScheduledRequest

Digests = Callable[[Any, Sequence[int]], Sequence[bytes]]
"""Of the engine's request: what names its prompt up to each of these depths."""

# Shorter prefixes may be computed by each job.
SHORTEST = 64


class CommonPrefixes:
    """The nodes of all open jobs by their tokens. With a single job nothing is noted."""

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
