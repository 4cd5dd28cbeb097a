"""The jobs of one scheduler in its engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.runtime_context import get_parallel, get_spec

from ...planner.machine_model import PoolShares, of_states, of_windows
from ...request import parse_request_id
from ...scheduling.adapter_slots import AdapterSlots
from ...scheduling.backlog import Backlog, BacklogMaker
from ...scheduling.job_plan import JobPlan
from ...scheduling.job_state import JobState
from ...scheduling.kv_accounting import KvAccounting, MicroBatches, TokenClock
from ...scheduling.open_jobs import CommonPrefixes, OpenJobs
from ...scheduling.scheduled_request import ScheduledRequest
from ..compat.scheduler_types import Req, ScheduleBatch, Scheduler
from .kv.host_prefixes import HostPrefixes, Prompt
from .kv.offloading import KvOffloader, drain_results
from .kv.planned_cache import PinnedPrefixes, PlannedRadixCache
from .mixed_batch import num_rows
from .shared_prefixes import SharedPrefixes
from .step_recorder import StepRecorder, StepReports

Known = tuple[JobState | None, ScheduledRequest]
"""A request and its job, which is None for an online request."""


class EngineJobs:
    """The jobs of one scheduler, and everything that its parts share.

    Args:
        scheduler: SGLang's, once its cache and memory pools are ready.
        offloader: None where KV cannot be moved to the host. SGLang then retracts requests.
        reports: where the record of each step goes.
        decode_only: whether other servers compute all prompts.

    Attributes:
        open: the open jobs, and the order in which their requests join.
        kv_accounting: the KV that running requests hold and will need.
        micro_batches, tokens: the decode clock with pipeline parallelism, and with
            speculation. ``tokens`` is None without speculation.
        cache, host: the prefixes on the device, and those on the host. ``host`` is None
            without an offloader.
        pinned: the prefixes that are kept for later requests.
        prefixes: the prefixes that leaders compute for followers.
        adapters: None for a server without adapters.
        make_backlog: makes the backlogs of the jobs that are opened.
        registry: finds the job of each request, from its arrival to its end.
        page_size: tokens of a page of KV.
        step_tokens: most tokens in a step, of prompts and decodes together.
    """

    def __init__(
        self,
        scheduler: Any,
        offloader: KvOffloader | None,
        reports: StepReports,
        *,
        decode_only: bool = False,
    ) -> None:
        cache: PlannedRadixCache = scheduler.tree_cache
        parallel = get_parallel()
        self.page_size = int(scheduler.page_size)
        self.step_tokens = int(
            scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
        )
        self.decode_only = decode_only
        self.open = OpenJobs()
        self.kv_accounting = KvAccounting(
            int(scheduler.max_total_num_tokens),
            self.page_size,
            mixed=bool(scheduler.is_mixed_chunk),
            second=_second_pool(
                cache, scheduler.token_to_kv_pool_allocator, self.step_tokens
            ),
            draft_slots=draft_slots(),
        )
        self.tokens = TokenClock(self.kv_accounting) if draft_slots() else None
        self.micro_batches = MicroBatches(
            parallel.pp_size + parallel.pp_async_batch_depth
            if parallel.pp_size > 1
            else 1
        )
        self.cache = cache
        self.offloader = offloader
        self.host = HostPrefixes(cache, offloader) if offloader is not None else None
        self.pinned = PinnedPrefixes(
            cache,
            self.open,
            self.host,
            saves_all=scheduler.server_args.enable_hierarchical_cache,
        )
        self.prefixes = SharedPrefixes(cache, self.pinned)
        self.recorder = StepRecorder(self.open, self.kv_accounting, cache, reports)
        self.adapters: AdapterSlots | None = None
        self.make_backlog: BacklogMaker = Backlog.of
        self.registry = RequestRegistry(self)
        ends = self.registry.leading_ends
        if cache.supports_mamba():
            ends = self.registry.stops
        cache.attach(self.pinned, self.registry.released, ends)


class SchedulerPart:
    """A part of a scheduler in its engine, with what all of them share.

    Args:
        scheduler: SGLang's.
        jobs: see :class:`EngineJobs`, whose attributes these are.
    """

    def __init__(self, scheduler: Scheduler, jobs: EngineJobs) -> None:
        self._scheduler = scheduler
        self._jobs = jobs.open
        self._registry = jobs.registry
        self._kv_accounting = jobs.kv_accounting
        self._micro_batches = jobs.micro_batches
        self._cache = jobs.cache
        self._pinned = jobs.pinned
        self._prefixes = jobs.prefixes
        self._recorder = jobs.recorder
        self._step_tokens = jobs.step_tokens
        self._page_size = jobs.page_size

    def _free_rows(self, running_batch: ScheduleBatch) -> int:
        """Rows of the running batch that nobody has."""
        return self._scheduler.get_num_allocatable_reqs(
            len(running_batch.reqs), running_batch=running_batch
        )

    def _drain(self, running_batch: ScheduleBatch) -> None:
        """Know all results, and forget the requests that have ended."""
        drain_results(self._scheduler)
        running_batch.filter_batch()
        running_batch.batch_is_full = False


class RequestRegistry:
    """Opens and closes jobs, and records the arrival and end of each request."""

    def __init__(self, jobs: EngineJobs) -> None:
        self._engine = jobs
        self._jobs = jobs.open
        self._common = CommonPrefixes(
            jobs.open, lambda req, ends: Prompt.of(req).digests(ends)
        )
        self._prefixes = jobs.prefixes
        self._pinned = jobs.pinned
        self._kv_accounting = jobs.kv_accounting
        self._recorder = jobs.recorder
        self._tokens = jobs.tokens
        self._page_size = jobs.page_size
        self._cache = jobs.cache
        self._share = not jobs.cache.disable
        self._both_ends = not jobs.decode_only
        self._closed: set[str] = set()
        self._announced: dict[str, JobPlan] = {}
        self._num_retired = 0
        self._known: dict[str, Known] = {}
        # Job and number of requests that have not arrived yet, by ids of their clients.
        self._named: dict[str, tuple[str, int]] = {}

    # Jobs -----------------------------------------------------------------------------

    def open(
        self, job_id: str, plan: JobPlan, names: Sequence[str] = (), first: int = 0
    ) -> None:
        """Open a job, or give it a new plan.

        A plan of an open job may cover other requests than the last one. Usually these are
        more, because the job is planned while its prompts are still being read.

        Args:
            names: ids of its requests from number ``first`` on. Other requests of the job
                are known by ids of ours.
        """
        self._named.update({name: (job_id, i) for i, name in enumerate(names, first)})
        self._announced[job_id] = plan
        if not self._share:
            plan = plan.without_prefixes()
        if not self._both_ends:
            plan = plan.from_one_end()
        if self._cache.lookahead:
            plan = plan.with_shorter_prefixes(self._cache.lookahead)
        job = self._jobs.get(job_id)
        if job is not None and job.plan.same_requests(plan):
            job.replan(plan)
        elif job is not None and job_id not in self._closed:
            self._extend(job, plan)
        else:
            if job is not None:
                # It was stopped, and is started again before its last requests left.
                self._jobs.remove(job)
                self._num_retired += 1
                job.job_id = f"{job.job_id} (stopped, {self._num_retired})"
                self._jobs.add(job)
                self._closed.add(job.job_id)
                self._drop_if_done(job)
            job = JobState(job_id, plan, self._page_size, self._engine.make_backlog)
            self._jobs.add(job)
            self._common.opened(job)
            self._jobs.set_priority(job, 0)
        self._closed.discard(job_id)
        longest = plan.est_decode_steps.max(initial=1.0)
        self._kv_accounting.extend_forecast(int(longest) + 1)

    def announced(self, job_id: str) -> JobPlan:
        """The last plan that :meth:`open` was given for a job that is not closed."""
        return self._announced[job_id]

    def _extend(self, job: JobState, plan: JobPlan) -> None:
        self._common.forget(job)
        extension = job.extend(plan, self._cached_len)
        self._common.note_all(job)
        self._pinned.unlock(extension.released)
        for request, own in extension.resized:
            self._kv_accounting.resize(request, own)
        running = [(each, self._cached_len(each)) for each in extension.running]
        self._prefixes.extended(job, running)

    def _cached_len(self, request: ScheduledRequest) -> int:
        """Tokens of a running request's prompt that the cache holds for others."""
        req: Req = request.req
        computed = request.input_len if request.decoding else int(req.prefix_len)
        return computed - self._cache.lookahead

    def set_priority(self, job_id: str, priority: int) -> None:
        job = self._jobs.get(job_id)
        if job is not None:
            self._jobs.set_priority(job, priority)

    def close(self, job_id: str) -> None:
        """No more requests of a job will arrive. Those that are here continue."""
        self._announced.pop(job_id, None)
        job = self._jobs.get(job_id)
        if job is not None:
            self._closed.add(job_id)
            self._drop_if_done(job)

    def _drop_if_done(self, job: JobState) -> None:
        if job.job_id in self._closed and not len(job):
            if self._named:  # requests that never arrived
                self._named = {
                    name: place
                    for name, place in self._named.items()
                    if place[0] != job.job_id
                }
            self._closed.discard(job.job_id)
            self._pinned.unpin_job(job)
            self._common.forget(job)
            self._jobs.remove(job)

    # Requests arrive and leave --------------------------------------------------------

    def enqueue(self, req: Req) -> bool:
        """Take a waiting request; False if it belongs to no job."""
        known = self._known.get(req.rid)
        if known is not None:
            job, request = known
            if job is None:
                return False
            if not request.waiting and not request.running:  # SGLang retracted it
                request.steps = max(0, len(req.output_ids))
                job.backlog.add(request)
                self._recorder.retracted += 1
            return True
        named = self._named.pop(req.rid, None)
        parsed = parse_request_id(req.rid) if named is None else (*named, 0)
        job_id, number, part = parsed
        job = self._jobs.get(job_id)
        if job is None:
            return False
        self._jobs.arrives(job)
        self._recorder.changes += 1
        request = job.add(
            req,
            number,
            len(req.origin_input_ids),
            max(0, (req.sampling_params.max_new_tokens or 0) - 1),
            part=part,
            rows=num_rows(req),
            adapter=req.lora_id,
        )
        self._known[req.rid] = (job, request)
        self._common.note(job, request)
        return True

    def of_job(self, req: Req) -> bool:
        """Whether a request, which may still be to arrive, belongs to an open job."""
        if req.rid in self._known:
            return not self.is_online(req)
        named = self._named.get(req.rid)
        job_id = parse_request_id(req.rid)[0] if named is None else named[0]
        return self._jobs.get(job_id) is not None

    def known(self, req: Req) -> Known | None:
        return self._known.get(req.rid)

    def planned(self, req: Req) -> tuple[JobState, ScheduledRequest] | None:
        """A request of a job. None for an online one."""
        job, request = self._known.get(req.rid, (None, None))
        return None if job is None or request is None else (job, request)

    def leading_ends(self, req: Req) -> list[int]:
        """Where the prefixes end that a request computes for others, ascending."""
        if (planned := self.planned(req)) is None:
            return []
        job, request = planned
        return sorted(int(job.uses.depth[node]) for node in request.leading)

    def stops(self, req: Req) -> list[int]:
        """Those of these ends where a recurrent state is worth keeping."""
        planned = self.planned(req)
        return [] if planned is None else planned[0].uses.stops(planned[1])

    @property
    def reqs(self) -> list[Req]:
        """SGLang's requests of all jobs, and the online ones that run."""
        return [request.req for _, request in self._known.values()]

    def is_online(self, req: Req) -> bool:
        return self.planned(req) is None

    def not_running(
        self, rid: str, *, everything: bool
    ) -> list[tuple[JobState, ScheduledRequest]]:
        """Requests of jobs that wait or are offloaded: that with the id ``rid``, or else
        all whose ids start like this, or ``everything``."""
        if not everything and rid in self._known:
            rids = [rid]
        else:
            rids = [r for r in self._known if everything or r.startswith(rid)]
        found = [self._known[each] for each in rids]
        return [
            (job, request)
            for job, request in found
            if job is not None and not request.running
        ]

    def join_online(self, request: ScheduledRequest) -> None:
        self._known[request.req.rid] = (None, request)
        self._kv_accounting.admit(request)

    def leave_online(self, request: ScheduledRequest) -> None:
        """SGLang could not admit an online request. It is known again when it joins."""
        del self._known[request.req.rid]
        self._kv_accounting.remove(request)

    def released(self, req: Req, checkpointed: bool) -> None:
        """A request gave its KV back: it ended, or SGLang retracted or aborted it. The tree
        keeps the KV that it computed if it was ``checkpointed``."""
        known = self._known.get(req.rid)
        if known is None:
            return
        job, request = known
        finished = req.finished()
        if request.running:
            self._leave(job, request, checkpointed=checkpointed, back=not finished)
        # An online request that SGLang retracted is known again when it joins.
        if finished or job is None:
            self.forget(job, request)

    def _leave(
        self,
        job: JobState | None,
        request: ScheduledRequest,
        *,
        checkpointed: bool,
        back: bool,
    ) -> None:
        if self._tokens is not None:
            self._tokens.ends(request)
        self._kv_accounting.remove(request)
        if job is None:
            return
        if not back:
            if checkpointed:
                self._pinned.save_answered(job, request)
            self._kv_accounting.learn_output_len(request)
            job.work.ended(request)
        if request.leaf < 0:
            return
        if checkpointed and request.leading:
            self._prefixes.show(job, request, request.input_len)
        job.leave(request, offloaded=back)

    def estimates_changed(self, requests: Iterable[ScheduledRequest]) -> None:
        """Running requests have outlived their estimates, which were raised."""
        by_job: dict[str, tuple[JobState, list[ScheduledRequest]]] = {}
        for request in requests:
            if (planned := self.planned(request.req)) is not None:
                job = planned[0]
                by_job.setdefault(job.job_id, (job, []))[1].append(request)
        for job, of_job in by_job.values():
            job.work.apply_estimates(of_job)

    def skip(self, job: JobState, request: ScheduledRequest) -> None:
        """A request that does not run never will."""
        if request.leaf >= 0:
            job.uses.skip(request.leaf, request.node)
            job.work.ended(request)
            self._pinned.unpin_spent(job, request)
        self.forget(job, request)

    def forget(self, job: JobState | None, request: ScheduledRequest) -> None:
        """A request is over."""
        self._recorder.changes += 1
        self._known.pop(request.req.rid, None)
        if job is not None:
            job.forget(request)
            self._drop_if_done(job)


def draft_slots() -> int:
    """Tokens of KV that SGLang allocates to each decoding request for its drafts. 0
    without speculation."""
    if get_spec().speculative_algorithm is None:
        return 0
    return int(get_alloc_reserve_per_decode())


def leave_room_for_drafts(scheduler: Any) -> None:
    """Have an answer end before its request and its drafts have no room left, even alone.
    SGLang counts no drafts there, and would end the request with an error."""
    if not draft_slots():
        return
    page = int(scheduler.page_size)
    longest = int(scheduler.max_total_num_tokens) // page * page - draft_slots()
    prompt = scheduler.max_req_len - scheduler.max_req_input_len
    scheduler.max_req_len = min(scheduler.max_req_len, longest)
    longest = scheduler.max_req_len - prompt
    scheduler.max_req_input_len = min(scheduler.max_req_input_len, longest)


def _second_pool(
    cache: PlannedRadixCache, allocator: Any, step_tokens: int
) -> PoolShares | None:
    """The pool of sliding-window layers or recurrent states. None if the model has neither."""
    if cache.supports_mamba():
        states = int(cache.req_to_token_pool.mamba_allocator.size)
        return of_states(states)
    if not cache.supports_swa():
        return None
    page = int(allocator.page_size)
    window = -(-int(cache.swa_retain_window) // page) * page + page
    late = max(1, envs.SGLANG_SWA_EVICTION_INTERVAL.get())
    capacity = int(allocator.size_swa)
    shares = of_windows(capacity, window, page, step_tokens, late)
    drafts = -(-draft_slots() // page) * page
    return shares._replace(row_units=shares.row_units + drafts)
