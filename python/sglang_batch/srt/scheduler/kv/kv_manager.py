"""Keeps KV available to the running requests: offloads requests and resumes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from sglang.srt.mem_cache.common import release_kv_cache

from ....scheduling.job_state import JobState
from ....scheduling.next_step import always, put_back
from ....scheduling.scheduled_request import ScheduledRequest
from ...compat.scheduler_types import Req, ScheduleBatch, Scheduler
from ..engine_jobs import EngineJobs, SchedulerPart
from ..step_recorder import HostUse
from .host_pool import recompute_time_s
from .offloading import KvOffloader, OffloadedRequest, can_offload

# Decode steps for which offloading frees KV at a time.
_STEPS_FREED = 8


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

    Attributes:
        first: by id, those that resume before any other request joins.
        waiting: by id, those that wait among the others of their job.
        num_recomputed: requests that lost their KV: the host pool was full, or their prefix
            was evicted.
    """

    def __init__(self, jobs: EngineJobs) -> None:
        self._offloader = jobs.offloader
        self._host = jobs.host
        self._recorder = jobs.recorder
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
            "prefetches": int(bool(offloader and offloader.near)),
            "prefixes_saved": host.num_saved if host else 0,
            "prefixes_restored": host.num_restored if host else 0,
        }

    def end_step(self) -> None:
        """The step is decided, and its forward pass is next."""
        offloader, recorder = self._offloader, self._recorder
        if offloader is not None:
            offloader.pool.end_step()
            totals = recorder.totals
            recorder.prefetched = offloader.num_prefetched - totals["prefetched"]
            recorder.kv_waits = offloader.pool.num_loads - totals["kv_waits"]


def _merged(running_batch: ScheduleBatch, back: ScheduleBatch) -> ScheduleBatch:
    if running_batch.is_empty():
        return back
    running_batch.merge_batch(back)
    return running_batch


class KvManager(SchedulerPart):
    """Moves requests between the device's KV and the host.

    Attributes:
        on_host: the requests that are on the host.
        decodes_fit: whether all running requests of this step have room for their next
            tokens, even if each of them begins a page.
        is_near: whether the KV of a request on the host need not be waited for.
    """

    def __init__(self, scheduler: Scheduler, jobs: EngineJobs) -> None:
        super().__init__(scheduler, jobs)
        # Without an offloader, no request is ever on the host.
        self._offloads = jobs.offloader is not None
        self._offloader = cast("KvOffloader", jobs.offloader)
        self.on_host = HostRequests(jobs)
        self.is_near: Callable[[ScheduledRequest], bool] = always
        self._alone = jobs.micro_batches.number == 1
        self._just_offloaded = False
        self.decodes_fit = False
        self._steps_that_fit = 0

    @property
    def may_join(self) -> bool:
        """Whether requests of jobs may join: none has just left or comes before them."""
        return not self.on_host.first and not self._just_offloaded

    # Offloading -----------------------------------------------------------------------

    def make_room_for_decodes(self, running_batch: ScheduleBatch) -> None:
        """Ensure that the running requests can decode. Offload the newest if not."""
        self._just_offloaded = False
        if self._steps_that_fit > 0:
            self._steps_that_fit -= 1
            self.decodes_fit = True
            return
        # SGLang's own check iterates over all requests. Each may begin a page, or with
        # speculation as many as its draft needs.
        need = len(running_batch.reqs) * self._page_size
        available = self._scheduler.token_to_kv_pool_allocator.available_size()
        if available >= need > 0 and not self._kv_accounting.draft_slots:
            # Other micro-batches take KV in between.
            self._steps_that_fit = available // need - 1 if self._alone else 0
            self.decodes_fit = True
            return
        if running_batch.is_empty() or running_batch.check_decode_mem():
            return
        self._drain(running_batch)
        if running_batch.is_empty() or running_batch.check_decode_mem():
            return
        self._kv_accounting.widen_margin()
        self._offload_for_decodes(running_batch)

    def _offload_for_decodes(self, running_batch: ScheduleBatch) -> None:
        # One request has to stay, or nothing would run. A prompt in progress runs too,
        # and so do other micro-batches.
        others = self._scheduler.chunked_req is not None or (
            not self._alone
            and self._kv_accounting.num_running > len(running_batch.reqs)
        )
        leave = 0 if others else 1
        steps = max(_STEPS_FREED, self._page_size)
        self.offload_until(running_batch, len(running_batch.reqs) * steps, leave=leave)
        # A prefix that one job has pinned may be in use by another, so that offloading
        # freed less than expected.
        while len(running_batch.reqs) > leave and not running_batch.check_decode_mem():
            rows = len(running_batch.reqs)
            self.offload_until(running_batch, 0, leave=leave, num_rows=1)
            if len(running_batch.reqs) == rows:
                break
        if running_batch.reqs and not running_batch.check_decode_mem():
            self.requeue_chunk()  # the remaining requests cannot be offloaded

    def note_allocation(self) -> None:
        """KV was allocated for more than the next tokens of decodes."""
        self.decodes_fit = False
        self._steps_that_fit = 0

    def offload_until(
        self,
        running_batch: ScheduleBatch,
        num_tokens: int,
        *,
        leave: int,
        num_rows: int = 0,
    ) -> None:
        """Offload requests of jobs, the newest first, until ``num_tokens`` can be allocated
        and ``num_rows`` requests have left. No result may be in flight. At least ``leave``
        requests stay."""
        rows = {req.rid for req in running_batch.reqs}
        out: list[Req] = []
        for request in reversed(self._kv_accounting.requests):
            short = self._pinned.reachable_tokens(num_tokens) < num_tokens
            short = short or len(out) < num_rows
            if not short or len(rows) - len(out) <= leave:
                break
            if request.req.rid in rows and self.offload(request):
                out.append(request.req)
        if out:
            self._just_offloaded = True
            running_batch.filter_batch(reqs_to_exclude=out)
            running_batch.batch_is_full = False

    def offload(self, request: ScheduledRequest) -> bool:
        """Move a running request of a job to the host; False if that is impossible."""
        planned = self._registry.planned(request.req)
        if planned is None or not self._offloads:
            return False
        job, req = planned[0], request.req
        takes_steps = request.takes_steps(self._kv_accounting.clock)
        if not (takes_steps or request.prompt_only) or not can_offload(req):
            return False
        self._kv_accounting.remove(request)
        request.steps = len(req.output_ids) - 1
        shared = 0
        if request.leaf >= 0:
            job.leave(request, offloaded=True)
            # It needs its prefixes again, even if no other request does.
            self._pinned.pin(job, req, job.uses.path(request.node))
            shared = min(job.uses.kept_depth(request.node), req.kv.cache_protected_len)
            # If the tree loses the prefix, the KV on the host is lost with it. A short
            # prefix is not worth that.
            if 2 * shared < req.kv.kv_committed_len:
                shared = 0
        if not self._make_host_room(job, request, shared):
            self._offloader.discard(req)
            self._scheduler._add_request_to_queue(req, is_retracted=True)
            self.on_host.num_recomputed += 1
            return True
        kv = self._offloader.offload(req, shared, self._recompute_time_s(job, request))
        one = OnHost(job, request, kv)
        if shared:
            job.left_prefix[request] = None
        if job.backlog.rule:
            self.on_host.let_wait(one)
        else:
            self.on_host.first[req.rid] = one
        self._recorder.offloaded += 1
        return True

    def _make_host_room(
        self, job: JobState, request: ScheduledRequest, shared_len: int
    ) -> bool:
        """Make room for a request on the host. False if it had better be computed again
        than the requests that are there."""
        pages = self._offloader.num_pages(request.req, shared_len)
        cost_s = self._recompute_time_s(job, request)
        out = self._offloader.room.to_recompute(pages, cost_s)
        if out is None:
            return False
        for name in out:
            if self._pinned.host is None or not self._pinned.host.drop(name):
                self._recompute(name)
        return True

    def _recompute_time_s(self, job: JobState, request: ScheduledRequest) -> float:
        """Seconds to compute a request again, from behind its prefix in the cache."""
        prefix = job.uses.kept_depth(request.node) if request.leaf >= 0 else 0
        num_tokens = request.input_len + request.steps - prefix
        return recompute_time_s(job.plan.cost, num_tokens, prefix)

    def requeue_chunk(self) -> None:
        """Return a job's request whose prompt is partly computed to the backlog. It
        continues later from the KV that the tree has. Online requests stay, and so does one
        whose last part another micro-batch still computes."""
        req = self._scheduler.chunked_req
        planned = self._registry.planned(req) if req is not None else None
        if req is None or planned is None or req.inflight_middle_chunks > 0:
            return
        job, request = planned
        # The registry is told, and others compute its prefixes.
        release_kv_cache(req, self._cache, checkpoint=False)
        req.reset_for_retract()
        job.backlog.add(request)
        self._scheduler.chunked_req = None

    # Resuming -------------------------------------------------------------------------

    def resume(self, running_batch: ScheduleBatch) -> ScheduleBatch:
        """Resume offloaded requests, in the order in which they were offloaded. Returns the
        running batch with them, which is a new one if nothing ran."""
        if not self.on_host.first or self._just_offloaded:
            return running_batch
        for rid, one in list(self.on_host.first.items()):
            if running_batch.reqs and not self.is_near(one.request):
                break
            need = self._tokens_to_resume(one)
            if need is None:  # a prefix of it is lost
                self._recompute(rid)
                continue
            back = self._resume_one(running_batch, one, need)
            if back is None:
                break
            self.on_host.forget(rid)
            running_batch = _merged(running_batch, back)
        return running_batch

    def _tokens_to_resume(self, one: OnHost) -> int | None:
        """KV to allocate for a request. None if its prefix is neither in the tree nor on
        the host."""
        need = self._offloader.tokens_to_resume(one.kv)
        if need is not None:
            return need
        accounting, shared = self._kv_accounting, one.kv.shared_len
        on_host = self._prefixes.on_host(one.job, one.request)[1] >= shared
        if on_host:
            reserve = one.kv.num_tokens + accounting.growth + self._page_size
            self._prefixes.restore(one.job, one.request, reserve)
            need = self._offloader.tokens_to_resume(one.kv)
        if need is None and on_host and accounting.num_running > 0:
            return accounting.in_pages(one.kv.end)  # it fits later
        return need

    def _resume_one(
        self, running_batch: ScheduleBatch, one: OnHost, need: int
    ) -> ScheduleBatch | None:
        job, request = one.job, one.request
        if not self._free_rows(running_batch):
            return None
        locked = self._jobs.locked_tokens + job.uses.newly_locked(request.node)
        num_prefixes = self._jobs.num_locked + job.uses.num_newly_locked(request.node)
        if not self._kv_accounting.fits(request, locked, 0, num_prefixes):
            return None
        back = self._load(one.kv, need)
        if back is None:
            return None
        job.done.start(request, -1, self._kv_accounting.usual_steps)
        self._kv_accounting.admit(request)
        if request.leaf >= 0:
            job.uses.start(request, request.input_len)
        self._runs_again(one)
        return back

    def _load(self, kv: OffloadedRequest, need: int) -> ScheduleBatch | None:
        reserve = self._kv_accounting.growth + self._page_size
        self._pinned.unpin_until_free(need + reserve)
        back = self._offloader.resume(kv, reserve)
        if back is not None:
            self.note_allocation()
            kv.req.time_stats.set_forward_entry_time()
        return back

    def _runs_again(self, one: OnHost) -> None:
        self._kv_accounting.begin_decoding(one.request)
        if one.request.leaf >= 0:
            self._pinned.unpin_spent(one.job, one.request)
        self._recorder.resumed += 1

    def join(
        self, running_batch: ScheduleBatch, requests: Sequence[ScheduledRequest]
    ) -> ScheduleBatch:
        """Have requests that were chosen from the host run, and return the running batch
        with them, which is a new one if nothing ran.

        One that does not fit after all waits again, and with it the others. One whose
        prefix was evicted is computed again.
        """
        full = False
        for request in requests:
            one = self.on_host.waiting[request.req.rid]
            need = None if full else self._tokens_to_resume(one)
            back = None if need is None else self._load(one.kv, need)
            if back is None:
                put_back(one.job, self._kv_accounting, request)
                if need is None and not full:
                    self._recompute(request.req.rid)
                full = full or need is not None
                continue
            self.on_host.forget(request.req.rid)
            self._runs_again(one)
            running_batch = _merged(running_batch, back)
        return running_batch

    def join_one(
        self, running_batch: ScheduleBatch, kv: OffloadedRequest
    ) -> ScheduleBatch | None:
        """Have an online request run whose KV is on the host. Returns the running batch
        with it, or None if it does not fit."""
        back = self._load(kv, self._kv_accounting.in_pages(kv.end))
        return None if back is None else _merged(running_batch, back)

    def received(self, kv: OffloadedRequest) -> None:
        """The KV of a job's request that has arrived is on the host. It waits among the
        others of its job, whatever their order."""
        planned = self._registry.planned(kv.req)
        assert planned is not None
        job, request = planned
        job.backlog.remove(request)
        request.steps = len(kv.req.output_ids) - 1
        self.on_host.let_wait(OnHost(job, request, kv))
        if job.joined is not None:
            job.joined.numbers.append(request.number)

    def recompute_all(self) -> None:
        """Discard all KV on the host. The requests are prefilled again."""
        if self._pinned.host is not None:
            self._pinned.host.drop_all()
        before = self.on_host.num_recomputed
        for rid in [*self.on_host.first, *self.on_host.waiting]:
            self._recompute(rid)
        # Neither the pool nor a prefix is to blame.
        self.on_host.num_recomputed = before

    def _recompute(self, rid: str) -> None:
        if rid in self.on_host.waiting:
            one = self.on_host.waiting[rid]
            one.job.take(one.request)
        one = self.on_host.forget(rid)
        req = self._offloader.give_up(one.kv)
        self._scheduler._add_request_to_queue(req, is_retracted=True)
        self.on_host.num_recomputed += 1

    def drop(self, request: ScheduledRequest) -> None:
        if request in self.on_host:
            self._offloader.drop(self.on_host.forget(request.req.rid).kv)
