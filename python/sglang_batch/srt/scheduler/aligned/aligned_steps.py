"""The steps of AlignedServe: rows leave in a switch, KV comes ahead, and prompts run ahead.

Which rows leave and which requests come next is for ``scheduling.length_backlog``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from ....scheduling.length_backlog import LengthBacklog, LengthBacklogs, fill_ahead
from ....scheduling.next_step import Filling
from ....scheduling.scheduled_request import ScheduledRequest
from ...compat.scheduler_types import ScheduleBatch
from ..engine_jobs import SchedulerPart
from ..kv.host_pool import HostKv
from ..kv.kv_manager import OnHost
from ..kv.offloading import OffloadedRequest
from ..step_hook import StepHook
from .prefetch import KvPrefetch, make_prefetch

# Requests and prefixes that are looked at to be prefetched.
_MOST_UPCOMING = 64


class AlignedSteps(SchedulerPart, StepHook):
    """Parks rows, prefetches KV and computes prompts ahead, in one scheduler.

    Args:
        scheduler: an ``OfflineScheduler`` whose requests can be offloaded.

    Raises:
        EngineError: the device cannot read the memory of ``prefetch_device``.
    """

    def __init__(self, scheduler: Any, backlogs: LengthBacklogs) -> None:
        config, jobs = scheduler.server_args.offline_config, scheduler.jobs
        super().__init__(scheduler, jobs)
        self._offloader = jobs.offloader
        self._kv_manager = scheduler.kv_manager
        self._on_host = scheduler.kv_manager.on_host
        self._backlogs = backlogs
        self._most_ahead = config.prefill_ahead_tokens
        self._computed: list[ScheduledRequest] = []
        self._prefetch: KvPrefetch | None = None
        if config.prefetch_bytes:
            self._prefetch = make_prefetch(self._offloader.pool, config)
            self._offloader.near = self._prefetch
            self._kv_manager.is_near = self._is_near

    # Prompts ahead --------------------------------------------------------------------

    def prompt_done(self, request: ScheduledRequest) -> bool:
        if request.prompt_only:
            self._computed.append(request)
        return request.prompt_only

    def begin(self, running_batch: ScheduleBatch) -> None:
        """Move requests whose prompt was computed ahead to the host."""
        if not self._computed:
            return
        for request in self._take_off(running_batch, self._computed):
            self._kv_accounting.decode_after_all(request)
            self._kv_accounting.begin_decoding(request)
        self._computed.clear()

    def fill_rest(self, filling: Filling, limit: int) -> None:
        """Half of the pool holds prompts that were computed ahead. The other half is for
        requests that have to make room."""
        if not self._most_ahead:
            return
        room = self._offloader.room
        most = min(self._most_ahead, room.num_pages // 2 * self._page_size)
        held = self._offloader.host_tokens + sum(
            request.input_len
            for request in self._kv_accounting.requests
            if request.prompt_only
        )
        fill_ahead(filling, limit, min(most - held, room.num_free * self._page_size))

    # Rows that leave ------------------------------------------------------------------

    def before_choice(self, running_batch: ScheduleBatch) -> None:
        """Move the requests that leave in a switch of batches to the host."""
        for job in self._jobs.each if self._kv_manager.may_join else ():
            backlog = job.backlog
            if isinstance(backlog, LengthBacklog) and (rows := backlog.to_park()):
                self._take_off(running_batch, rows)

    def _take_off(
        self, running_batch: ScheduleBatch, requests: Sequence[ScheduledRequest]
    ) -> list[ScheduledRequest]:
        """Move running requests to the host, where they wait among those of their job.

        Returns:
            The requests that have to continue.
        """
        self._drain(running_batch)
        rows = {req.rid for req in running_batch.reqs}
        out, stay = [], []
        for request in requests:
            if not request.running:
                continue
            if request.req.rid in rows and self._kv_manager.offload(request):
                out.append(request.req)
            else:
                stay.append(request)
        if out:
            running_batch.filter_batch(reqs_to_exclude=out)
            running_batch.batch_is_full = False
        return stay

    # Prefetch -------------------------------------------------------------------------

    def step_decided(self, seconds: float) -> None:
        """Prefetch during the forward pass."""
        if self._prefetch is not None:
            # Rows are parked where no step waits for them to come back.
            free = self._offloader.room.num_free * self._page_size
            self._backlogs.host_room = free
            self._prefetch.fetch([*islice(self._upcoming(), _MOST_UPCOMING)], seconds)

    def _is_near(self, request: ScheduledRequest) -> bool:
        """Whether a request's KV is in the buffer, or too large for it."""
        rid, on_host = request.req.rid, self._on_host
        one = on_host.waiting.get(rid) or on_host.first.get(rid)
        assert self._prefetch is not None
        return one is None or self._prefetch.is_near(_host_kv(one.kv))

    def _upcoming(self) -> Iterator[HostKv]:
        """KV on the host of requests that may resume, the next ones first, each behind
        the prefixes that the cache has lost."""
        seen: set[tuple[str, int]] = set()
        for job, request, kv in self._next_to_resume():
            node = job.job_id, request.node
            if kv.shared_len and node not in seen:
                seen.add(node)
                if self._offloader.tokens_to_resume(kv) is None:
                    yield from self._prefixes.on_host(job, request)[0]
            yield _host_kv(kv)

    def _next_to_resume(self) -> Iterator[OnHost]:
        yield from self._on_host.first.values()
        for job in self._jobs.in_order() if self._on_host.waiting else ():
            if isinstance(job.backlog, LengthBacklog):
                for request in job.backlog.next_on_host():
                    yield self._on_host.waiting[request.req.rid]


def _host_kv(kv: OffloadedRequest) -> HostKv:
    return HostKv(kv.req.rid, kv.num_tokens, kv.runs)
