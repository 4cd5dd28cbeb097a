"""The requests whose KV is on the host: which wait for what, and the pool that they use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...scheduling.job_state import JobState
from ...scheduling.scheduled_request import ScheduledRequest
from .engine_jobs import EngineJobs
from .kv.offloading import KvOffloader, OffloadedRequest
from .kv.prefetch import HostKv
from .step_recorder import HostUse


class OnHost(NamedTuple):
    """A request of a job on the host."""

    job: JobState
    request: ScheduledRequest
    kv: OffloadedRequest

    @property
    def rid(self) -> str:
        name: str = self.request.req.rid
        return name


class HostRequests:
    """Requests of jobs on the host.

    Args:
        most_ahead: most tokens of KV of prompts that were computed ahead.

    Attributes:
        first: by id, those that resume before any other request joins.
        waiting: by id, those that wait among the others of their job.
        num_recomputed: requests that lost their KV: the host pool was full, or their
            prefix was evicted.
    """

    def __init__(self, jobs: EngineJobs, most_ahead: int) -> None:
        self._offloader = jobs.offloader
        self._host = jobs.host
        self._jobs = jobs.open
        self._kv_accounting = jobs.kv_accounting
        self._prefixes = jobs.prefixes
        self._recorder = jobs.recorder
        self._page_size = jobs.page_size
        self._most_ahead = most_ahead
        self.first: dict[str, OnHost] = {}
        self.waiting: dict[str, OnHost] = {}
        self.num_recomputed = 0

    def __len__(self) -> int:
        return len(self.first) + len(self.waiting)

    def __contains__(self, request: ScheduledRequest) -> bool:
        return request.req.rid in self.first or request.req.rid in self.waiting

    def let_wait(self, one: OnHost) -> None:
        """A request waits among the others of its job."""
        self.waiting[one.rid] = one
        one.request.on_host = True
        one.job.backlog.add(one.request)

    def forget(self, rid: str) -> OnHost:
        """A request is no longer on the host."""
        one = self.first.pop(rid, None) or self.waiting.pop(rid)
        one.request.on_host = False
        one.job.left_prefix.pop(one.request, None)
        return one

    # The pool -------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Memory that offloaded KV takes."""
        return self._offloader.host_bytes if self._offloader is not None else 0

    @property
    def use(self) -> HostUse:
        """The pool, for metrics."""
        capacity = self._offloader.pool.num_bytes if self._offloader is not None else 0
        return HostUse(self.num_bytes, capacity, self.num_recomputed)

    @property
    def state(self) -> dict[str, int]:
        """The pool, for ``/server_info``."""
        offloader, host = self._offloader, self._host
        return {
            "offloaded_now": len(self),
            "offloaded_host_bytes": self.num_bytes,
            "offloaded_host_bytes_most": offloader.most_bytes if offloader else 0,
            "offload_bytes": offloader.pool.num_bytes if offloader else 0,
            "offload_saves": offloader.pool.num_saves if offloader else 0,
            "offload_loads": offloader.pool.num_loads if offloader else 0,
            "offload_recomputed": self.num_recomputed,
            "prefetches": int(bool(offloader and offloader.prefetch)),
            "prefixes_saved": host.num_saved if host else 0,
            "prefixes_restored": host.num_restored if host else 0,
        }

    def ahead_tokens(self) -> int:
        """Tokens of prompts that may be computed ahead: half of the pool holds them.

        The other half is for requests that have to make room.
        """
        if self._offloader is None:
            return 0
        room = self._offloader.room
        most = min(self._most_ahead, room.num_pages // 2 * self._page_size)
        held = self._offloader.host_tokens + self._kv_accounting.ahead_tokens
        return max(0, min(most - held, room.num_free * self._page_size))

    def end_step(self) -> None:
        """The step is decided, and its forward pass is next."""
        offloader, recorder = self._offloader, self._recorder
        if offloader is not None:
            offloader.end_step()
            # Rows are parked where no step waits for them to come back.
            if offloader.prefetch is not None:
                free = offloader.room.num_free * self._page_size
                self._kv_accounting.host_room = free
            totals = recorder.totals
            recorder.prefetched = offloader.num_prefetched - totals["prefetched"]
            recorder.kv_waits = offloader.pool.num_loads - totals["kv_waits"]

    # Prefetching ----------------------------------------------------------------------

    def is_near(self, request: ScheduledRequest) -> bool:
        """Whether a request on the host need not be waited for: it is in the buffer on the
        device, or too large for it."""
        prefetch = self._offloader.prefetch if self._offloader is not None else None
        one = self.waiting.get(request.req.rid) or self.first.get(request.req.rid)
        return prefetch is None or one is None or prefetch.is_near(_host_kv(one.kv))

    def fetch(self, seconds: float) -> None:
        """Prefetch during the forward pass, which takes so many seconds."""
        if self._offloader is not None:
            self._offloader.fetch(self._upcoming(self._offloader), seconds)

    def _upcoming(self, offloader: KvOffloader) -> Iterator[HostKv]:
        """KV on the host of requests that may resume, the next ones first, each behind
        the prefixes that the cache has lost."""
        seen: set[tuple[str, int]] = set()
        for job, request, kv in self._next_to_resume():
            node = job.job_id, request.node
            if kv.shared_len and node not in seen:
                seen.add(node)
                if offloader.tokens_to_resume(kv) is None:
                    yield from self._prefixes.on_host(job, request)[0]
            yield _host_kv(kv)

    def _next_to_resume(self) -> Iterator[OnHost]:
        yield from self.first.values()
        for job in self._jobs.in_order() if self.waiting else ():
            for request in job.backlog.next_on_host():
                yield self.waiting[request.req.rid]


def _host_kv(kv: OffloadedRequest) -> HostKv:
    return HostKv(kv.req.rid, kv.num_tokens, kv.runs or ())
