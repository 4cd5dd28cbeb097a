"""The jobs that are open in one scheduler process: requests that come and go, and
the shared prefixes that are kept for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.common import checkpoint_kv_cache

from ..request import parse_request_id
from ..scheduling.job_plan import JobPlan
from ..scheduling.job_state import JobState
from ..scheduling.line import Line
from ..scheduling.occupancy import Occupancy
from .planned_cache import PlannedRadixCache

if TYPE_CHECKING:
    from .steps import Steps

Known = tuple[JobState | None, Line]
"""A line and its job; None for an online request's."""


class OpenJobs:
    """Jobs, in the order in which they were opened, and all requests that are known.

    Attributes:
        each: the jobs; quicker to go over than this object itself.
    """

    def __init__(
        self,
        cache: PlannedRadixCache,
        occupancy: Occupancy,
        steps: Steps,
        page_size: int,
    ) -> None:
        self._cache = cache
        self._occupancy = occupancy
        self._steps = steps
        self._page_size = page_size
        self._jobs: dict[str, JobState] = {}
        self.each = self._jobs.values()
        self._closed: set[str] = set()
        self._num_retired = 0
        self._known: dict[str, Known] = {}
        self._leaders: list[tuple[JobState, Line]] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[JobState]:
        return iter(self.each)

    def in_turn(self) -> Iterable[JobState]:
        """The jobs, the one whose requests are to join first at the front.

        By priority; those of one priority take turns, so that each gets as much. But
        an order that is taken from both ends balances all that runs: such jobs go one
        after the other, beside each other they would each hold back for the others.
        """
        if len(self._jobs) < 2:
            return self.each
        return sorted(
            self.each, key=lambda job: (-job.priority, 0 if job.dual else job.served)
        )

    # Jobs -----------------------------------------------------------------------------

    def open(self, job_id: str, plan: JobPlan) -> int:
        """A job opens, or gets a new plan; returns the requests of it that are here."""
        if self._cache.disable:
            plan = plan.without_prefixes()
        job = self._jobs.get(job_id)
        if job is not None and job.plan.same_requests(plan):
            job.replan(plan)
        else:
            if job is not None:
                self._retire(job)
            self._jobs[job_id] = JobState(job_id, plan, self._page_size)
            self.set_priority(job_id, 0)
        self._closed.discard(job_id)
        longest = plan.steps.max(initial=1.0)
        self._occupancy.cover(int(longest) + 1)
        return len(self._jobs[job_id])

    def set_priority(self, job_id: str, priority: int) -> int:
        """Change a job's priority; returns the requests of it that are here.

        What others of that priority were served before is not made up for.
        """
        job = self._jobs.get(job_id)
        if job is None:
            return 0
        job.priority = priority
        peers = [
            other.served
            for other in self
            if other is not job and other.priority == priority
        ]
        job.served = min(peers, default=job.served)
        return len(job)

    def _retire(self, job: JobState) -> None:
        """A job that was stopped is started again before its last requests have left."""
        del self._jobs[job.job_id]
        self._num_retired += 1
        job.job_id = f"{job.job_id} (stopped, {self._num_retired})"
        self._jobs[job.job_id] = job
        self._closed.add(job.job_id)
        self._drop_if_done(job.job_id)

    def close(self, job_id: str) -> int:
        """No more requests of a job will come; what is here of it goes on."""
        if job_id not in self._jobs:
            return 0
        self._closed.add(job_id)
        left = len(self._jobs[job_id])
        self._drop_if_done(job_id)
        return left

    def _drop_if_done(self, job_id: str) -> None:
        if job_id in self._closed and not len(self._jobs[job_id]):
            self._closed.discard(job_id)
            self.unpin(self._jobs[job_id], list(self._jobs[job_id].uses.pins))
            del self._jobs[job_id]

    @property
    def num_waiting(self) -> int:
        """Requests of all jobs that wait here; parked ones are not among them."""
        return sum(job.num_waiting for job in self)

    @property
    def waiting_tokens(self) -> int:
        return sum(job.waiting_tokens for job in self)

    @property
    def locked_tokens(self) -> int:
        """Tokens of shared prefixes that running requests use."""
        return sum(job.uses.locked_tokens for job in self)

    @property
    def idle_tokens(self) -> int:
        """Tokens of shared prefixes that are kept for requests to come only."""
        return sum(job.uses.idle_tokens for job in self)

    # Requests come and go -------------------------------------------------------------

    def enqueue(self, req: Any) -> bool:
        """Take a request that is to wait; False for one that belongs to no job."""
        known = self._known.get(req.rid)
        if known is not None:
            job, line = known
            if job is None:
                return False
            if not line.waiting and not line.running:  # SGLang retracted it
                line.steps = max(0, len(req.output_ids))
                job.backlog.add(line)
                self._steps.retracted += 1
            return True
        job_id, number, part = parse_request_id(req.rid)
        job = self._jobs.get(job_id)
        if job is None:
            return False
        line = job.add(
            req,
            number,
            len(req.origin_input_ids),
            max(0, (req.sampling_params.max_new_tokens or 0) - 1),
            part=part,
        )
        self._known[req.rid] = (job, line)
        return True

    def known(self, req: Any) -> Known | None:
        return self._known.get(req.rid)

    def is_online(self, req: Any) -> bool:
        known = self._known.get(req.rid)
        return known is None or known[0] is None

    def not_running(self, rid: str, *, everything: bool) -> list[tuple[JobState, Line]]:
        """Lines of jobs that wait or are parked.

        A ``rid`` that is one of ours means that request only, any other is a prefix.
        """
        if not everything and rid in self._known:
            rids = [rid]
        else:
            rids = [r for r in self._known if everything or r.startswith(rid)]
        found = [self._known[each] for each in rids]
        return [
            (job, line) for job, line in found if job is not None and not line.running
        ]

    def join_online(self, line: Line) -> None:
        self._known[line.req.rid] = (None, line)
        self._occupancy.join(line)

    def leave_online(self, line: Line) -> None:
        """SGLang could not admit it after all; it is known again when it joins."""
        del self._known[line.req.rid]
        self._occupancy.leave(line)

    def released(self, req: Any, checkpointed: bool) -> None:
        """A request gave its KV back: it ended, or SGLang retracted or aborted it."""
        known = self._known.get(req.rid)
        if known is None:
            return
        job, line = known
        finished = req.finished()
        if line.running:
            self._leave(job, line, checkpointed=checkpointed, back=not finished)
        # An online request that SGLang retracted is known again when it joins.
        if finished or job is None:
            self.forget(job, line)

    def _leave(
        self, job: JobState | None, line: Line, *, checkpointed: bool, back: bool
    ) -> None:
        self._occupancy.leave(line)
        if job is None:
            return
        if not back:
            self._occupancy.ended(line)
            job.work.ended(line)
        if line.leaf < 0:
            return
        if checkpointed and line.leading:
            self.show(job, line, line.input_len)
        job.release_followers(job.uses.leave(line, parked=back))

    def expect(self, lines: Iterable[Line]) -> None:
        """The estimates of running lines have changed."""
        by_job: dict[str, list[Line]] = {}
        for line in lines:
            job, _ = self._known.get(line.req.rid, (None, line))
            if job is not None:
                by_job.setdefault(job.job_id, []).append(line)
        for job_id, of_job in by_job.items():
            self._jobs[job_id].work.expect(of_job)

    def skip(self, job: JobState, line: Line) -> None:
        """A line that did not run never will."""
        if line.leaf >= 0:
            job.uses.skip(line)
            job.work.ended(line)
            self.unpin(job, job.uses.spent(line))
        self.forget(job, line)

    def forget(self, job: JobState | None, line: Line) -> None:
        """A request is over."""
        self._known.pop(line.req.rid, None)
        if job is not None:
            job.forget(line)
            self._drop_if_done(job.job_id)

    # Prefixes -------------------------------------------------------------------------

    def pin(self, job: JobState, req: Any, nodes: list[int]) -> None:
        """Keep those of a request's prefixes that others will need."""
        for node in nodes:
            if job.uses.wanted(node):
                lock = self._cache.keep(req, int(job.uses.depth[node]))
                if lock is not None:
                    job.uses.pin(node, lock)

    def unpin(self, job: JobState, nodes: list[int]) -> None:
        for node in nodes:
            self._cache.unlock(job.uses.unpin(node))

    def unpin_furthest(self) -> bool:
        """Let go of the prefix that is needed last; False if none is kept."""
        # Of the job whose turn comes last.
        for job in reversed([*self.in_turn()]):
            node = job.uses.furthest()
            if node:
                self.unpin(job, [node])
                return True
        return False

    def forget_pins(self) -> None:
        """The tree was emptied, and its locks with it."""
        for job in self:
            job.uses.forget_pins()

    def started(self, job: JobState, line: Line, cached: int) -> None:
        """A planned line was admitted, ``cached`` tokens of its prompt in the tree."""
        job.uses.lead(line, cached)
        if line.leading:
            self.show(job, line, cached)
        kept = [n for n in job.uses.path(line.node) if job.uses.depth[n] <= cached]
        self.pin(job, line.req, kept)
        self.unpin(job, job.uses.spent(line))
        if line.leading:
            self._leaders.append((job, line))

    def show(self, job: JobState, line: Line, num_tokens: int) -> None:
        """The tree holds ``num_tokens`` of a prompt: who waited for them goes on."""
        done = job.uses.computed(line, num_tokens)
        self.pin(job, line.req, done)
        job.release_followers(done)

    def show_computed(self, chunked: Any) -> None:
        """Make what leaders computed in the last step visible to this one.

        SGLang would do so when the step's result is processed, after the next batch
        was built. The next forward runs after the last one, so that it may read the
        KV which that one writes.

        chunked: the request whose prompt is partly computed, or None.
        """
        if not self._leaders:
            return
        going_on = []
        for job, line in self._leaders:
            if not line.running or not line.leading:
                continue
            if line.req is chunked:  # SGLang has put it into the tree already
                self.show(job, line, line.req.prefix_len)
                going_on.append((job, line))
            elif not line.req.finished() and line.req.kv.holds_kv:
                checkpoint_kv_cache(line.req, self._cache)
                self.show(job, line, line.input_len)
        self._leaders = going_on
