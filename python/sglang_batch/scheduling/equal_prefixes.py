"""Prefixes that several open jobs have: each is computed once for all of them.

Every job has a prefix tree of its own. Here their nodes are found by the tokens up to
them. A node that one job computes is awaited by the others, too, and once it is in the
cache all of them pin it. So it stays until the last job has used it.

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
"""Of the engine's request: what names its prompt up to each of these ends."""


class EqualPrefixes:
    """The nodes of all open jobs by the tokens up to them.

    With a single job nothing is noted.
    """

    def __init__(self, jobs: OpenJobs, digests: Digests) -> None:
        self._jobs = jobs
        self._digests = digests
        self._nodes: dict[bytes, dict[JobState, int]] = {}
        self._digest_of: dict[JobState, dict[int, bytes]] = {}

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

    def note(self, job: JobState, request: ScheduledRequest) -> list[int]:
        """Note the prefixes of a request that has arrived.

        Returns:
            Those of its nodes that were not noted before.
        """
        if request.leaf < 0 or len(self._jobs) < 2:
            return []
        known = self._digest_of.setdefault(job, {})
        path = job.uses.path(request.node)[::-1]
        if not path or path[-1] in known:
            return []
        ends = [int(job.uses.depth[node]) for node in path]
        new = []
        for node, digest in zip(path, self._digests(request.req, ends), strict=True):
            if node not in known:
                known[node] = digest
                self._nodes.setdefault(digest, {})[job] = node
                new.append(node)
                for other, at in self._elsewhere(job, node):
                    if (leader := other.uses.computing.get(at)) is not None:
                        job.uses.await_node(node, leader)
        return new

    def forget(self, job: JobState) -> None:
        """A job is closed, or will have another tree. Nobody awaits its prefixes now."""
        for node, digest in self._digest_of.pop(job, {}).items():
            nodes = self._nodes[digest]
            if nodes.get(job) == node:
                del nodes[job]
            for other, at in nodes.items():
                other.no_longer_awaits(at, job)
            if not nodes:
                del self._nodes[digest]

    def _elsewhere(self, job: JobState, node: int) -> list[tuple[JobState, int]]:
        """The same prefix in other jobs."""
        digest = self._digest_of.get(job, {}).get(node)
        nodes = self._nodes.get(digest, {}) if digest is not None else {}
        return [(other, at) for other, at in nodes.items() if other is not job]
