"""Shared prefixes while they are computed: when followers of a leader may join.

The first request that needs a prefix computes it and is its leader. Followers wait until
the tree holds the prefix, which is then pinned for them. Which node of the plan's tree is
computed by whom is in ``scheduling.prefix_uses``.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.mem_cache.base_prefix_cache import TreeLock
from sglang.srt.mem_cache.common import checkpoint_kv_cache

from ...scheduling.job_state import JobState
from ...scheduling.scheduled_request import ScheduledRequest
from ..compat.scheduler_types import Req
from .kv.host_pool import HostKv
from .kv.host_prefixes import Prompt
from .kv.planned_cache import PinnedPrefixes, PlannedRadixCache


class SharedPrefixes:
    """The running leaders of all jobs."""

    def __init__(self, cache: PlannedRadixCache, pinned: PinnedPrefixes) -> None:
        self._cache = cache
        self._pinned = pinned
        self._leaders: list[tuple[JobState, ScheduledRequest]] = []
        self._restored: list[TreeLock] = []

    def started(self, job: JobState, request: ScheduledRequest, cached: int) -> None:
        """A planned request was admitted with ``cached`` prompt tokens in the tree."""
        job.lead(request, cached)
        if request.leading:
            self.show(job, request, cached)
        self._pin_cached(job, request, cached)
        self._pinned.unpin_spent(job, request)
        if request.leading:
            self._leaders.append((job, request))

    def extended(
        self, job: JobState, running: Sequence[tuple[ScheduledRequest, int]]
    ) -> None:
        """A job got a plan with other prefixes. ``running`` are its running requests, with
        the prompt tokens of each in the tree."""
        self._leaders = [each for each in self._leaders if each[0] is not job]
        for request, cached in running:
            self._pin_cached(job, request, cached)
            if request.leading:
                self._leaders.append((job, request))

    def _pin_cached(
        self, job: JobState, request: ScheduledRequest, cached: int
    ) -> None:
        path = job.uses.path(request.node)
        kept = [node for node in path if job.uses.depth[node] <= cached]
        self._pinned.pin(job, request.req, kept)

    def restore(self, job: JobState, request: ScheduledRequest, reserve: int) -> int:
        """Put prefixes of a request that is about to join back from the host. They are
        locked until :meth:`step_built`: the next one that is put back must not evict them.

        Args:
            reserve: tokens of KV that must be free or evictable afterwards.

        Returns:
            The tokens of its prompt that the tree holds now, 0 if none came back.
        """
        if self._pinned.host is None:
            return 0
        tokens = self._pinned.host.restore(
            Prompt.of(request.req),
            self._depths(job, request),
            reserve,
            self._pinned.unpin_until_free,
        )
        if tokens:
            self.show(job, request, tokens)
            lock = self._cache.lock_prefix(request.req, tokens)
            if lock is not None:
                self._restored.append(lock)
        return tokens

    def on_host(
        self, job: JobState, request: ScheduledRequest
    ) -> tuple[list[HostKv], int]:
        """The KV that :meth:`restore` would load for a request, and the tokens of its prompt
        that the tree would hold then: 0 if nothing of it is on the host."""
        host = self._pinned.host
        if host is None:
            return [], 0
        return host.missing(Prompt.of(request.req), self._depths(job, request))

    @staticmethod
    def _depths(job: JobState, request: ScheduledRequest) -> list[int]:
        """Where the prefixes of a request end, in ascending order."""
        path = job.uses.path(request.node)
        return [int(job.uses.depth[node]) for node in path][::-1]

    def step_built(self) -> None:
        """The requests that joined have locked their prefixes themselves."""
        for lock in self._restored:
            self._cache.unlock(lock)
        self._restored.clear()

    def show(self, job: JobState, request: ScheduledRequest, num_tokens: int) -> None:
        """The tree holds ``num_tokens`` of a leader's prompt: followers may join."""
        done = job.uses.computed(request, num_tokens)
        self._pinned.pin(job, request.req, done)
        job.release_followers(done)
        for node in done:
            for other, at in job.elsewhere(node):
                other.use_now(at)
                other.no_longer_awaits(at, job)

    def show_computed(self, chunked: Req | None) -> None:
        """Put prefixes that leaders computed in the last step into the tree, but for the
        part of a ``chunked`` prompt, which SGLang has put there.

        SGLang would do so when it processes the step's result, which is after the next
        batch is built. The next forward runs after the last one, so it may read KV that the
        last one writes.
        """
        if not self._leaders:
            return
        still_leading, lookahead = [], self._cache.lookahead
        for job, request in self._leaders:
            if not request.running or not request.leading:
                continue
            req: Req = request.req
            if req is chunked:  # SGLang has put it into the tree already
                self.show(job, request, req.prefix_len - lookahead)
                still_leading.append((job, request))
            elif not req.finished() and req.kv.holds_kv:
                checkpoint_kv_cache(req, self._cache)
                self.show(job, request, request.input_len - lookahead)
        self._leaders = still_leading
