"""A job inside the scheduler: its plan, waiting requests and shared prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .backlog import Backlog, BacklogMaker
from .job_plan import JobPlan, LeafNumbers
from .job_work import JobWork, LengthBias, WorkLeft, subtrees
from .prefix_uses import PrefixUses
from .scheduled_request import ScheduledRequest

# Position of unplanned requests: after all others, in the order of arrival.
UNPLANNED_POSITION = 1 << 40
# Estimate for a request without any other.
DEFAULT_EST_DECODE_STEPS = 256
# Where more requests share a prefix, it is used all the time.
_MOST_AHEAD = 1024
# Unplanned requests beyond it are not noted when they end. A plan that has them then
# pins their prefixes longer than necessary.
_MOST_ENDED = 1 << 24


class Extension(NamedTuple):
    """The consequences of a plan that covers other requests.

    released: the cache's locks on prefixes that are no longer needed.
    running: the planned requests that run.
    resized: running requests whose own tokens have changed, and their number before.
    """

    released: list[Any]
    running: list[ScheduledRequest]
    resized: list[tuple[ScheduledRequest, int]]


class Joined(NamedTuple):
    """The numbers of a job's requests that joined a step and are still to be reported, and
    SGLang's address of the process that wants to know, if it is not the only one."""

    report_to: str | None
    numbers: list[int]


class JobState:
    """One open job.

    Attributes:
        uses: its shared prefixes.
        backlog: requests that may be admitted.
        work: its remaining compute and KV reads.
        done: the work that was done for it, and that its running requests need.
        left_prefix: requests whose KV is on the host, but for a prefix that they left in
            the cache.
        num_followers: requests that wait for a prefix to be computed.
        adapters: by adapter, its requests that have arrived and not ended.
        num_without_adapter: requests that wait until their adapter may be loaded.
        priority: among open jobs, requests of the job with the highest join first.
        joined: None if nobody wants to know.
        elsewhere: by node, those of other open jobs that begin with the same tokens, see
            ``open_jobs.CommonPrefixes``.
    """

    def __init__(
        self,
        job_id: str,
        plan: JobPlan,
        page_size: int,
        make_backlog: BacklogMaker = Backlog.of,
    ) -> None:
        self.job_id = job_id
        self.plan = plan
        self._page_size = page_size
        self._leaves = LeafNumbers(plan.number)
        # By number, from the lowest of the plan on: whether a request ended unplanned.
        self._ended = bytearray()
        self.uses = PrefixUses(plan, page_size)
        self.left_prefix: dict[ScheduledRequest, None] = {}
        self._make_backlog = make_backlog
        self.backlog = make_backlog(plan)
        self._followers: dict[int, list[ScheduledRequest]] = {}
        self.num_followers = 0
        self.adapters: Counter[str | None] = Counter()
        self._without_adapter: dict[str | None, list[ScheduledRequest]] = {}
        self.num_without_adapter = 0
        self._requests: dict[
            str, ScheduledRequest
        ] = {}  # by request id, until they end
        self._by_leaf: dict[int, ScheduledRequest] = {}
        self.work = WorkLeft(plan)
        self.done = JobWork(plan.cost)
        self._subtree = subtrees(plan.parent, plan.leaf_begin, plan.leaf_end)
        self.priority = 0
        self.joined: Joined | None = None
        self.elsewhere: Callable[[int], Sequence[tuple[JobState, int]]]
        self.elsewhere = lambda node: ()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        return self.backlog.count + self.num_followers + self.num_without_adapter

    @property
    def waiting_tokens(self) -> int:
        return self.backlog.tokens + sum(
            request.input_len for request in self.outside_backlog()
        )

    @property
    def dual(self) -> bool:
        return self.plan.density is not None

    def outside_backlog(self) -> Iterator[ScheduledRequest]:
        yield from self.followers()
        for requests in self._without_adapter.values():
            yield from requests

    def followers(self) -> Iterator[ScheduledRequest]:
        for requests in self._followers.values():
            yield from requests

    # Requests -------------------------------------------------------------------------

    def add(
        self,
        req: Any,
        number: int,
        input_len: int,
        max_decode_steps: int,
        *,
        part: int = 0,
        rows: int = 1,
        adapter: str | None = None,
    ) -> ScheduledRequest:
        """Add a request of this job that arrived to the backlog.

        Args:
            number: its number in the job, -1 if unknown.
            part: its index among the sequences of a request with several. A plan has one of
                them, and the others get its position.
            rows: of the running batch that it takes, more than one for a beam search.
        """
        request = ScheduledRequest(
            req,
            leaf=-1,
            node=0,
            position=UNPLANNED_POSITION,
            input_len=input_len,
            own=input_len,
            max_decode_steps=max_decode_steps,
            est_decode_steps=min(max_decode_steps, DEFAULT_EST_DECODE_STEPS),
            number=number,
            part=part,
            rows=rows,
            work=self.done,
            adapter=adapter,
        )
        self.adapters[adapter] += 1
        skipped = self._place(request)
        if skipped >= 0:
            self.uses.skip(skipped, int(self.plan.node[skipped]))
        elif request.leaf >= 0 and self.uses.started[request.leaf]:
            # It was taken back before it ran, and is sent again.
            self.uses.expect_again(request)
            self.work.expected_again(request)
        self._requests[req.rid] = request
        self.backlog.add(request)
        return request

    def _place(self, request: ScheduledRequest) -> int:
        """Set a request's place in the plan. Returns the leaf that the plan has for a
        request whose prompt is another one, else -1."""
        plan = self.plan
        leaf, skipped = self._leaves.of(request.number), -1
        request.position = int(plan.position[leaf]) if leaf >= 0 else UNPLANNED_POSITION
        if leaf >= 0 and request.part:
            leaf = -1
        if leaf >= 0 and plan.input_len[leaf] != request.input_len:
            # The engine has another prompt than was planned.
            leaf, skipped = -1, leaf
        request.leaf = leaf
        if leaf >= 0:
            self._by_leaf[leaf] = request
        request.node = int(plan.node[leaf]) if leaf >= 0 else 0
        request.subtree = int(self._subtree[request.node])
        request.own = request.input_len - int(self.uses.depth[request.node])
        request.cached_node = -1
        if leaf >= 0 and not request.running:
            request.read_len = int(plan.read_len[leaf])
            if request.steps == 0:
                request.est_decode_steps = self._est_decode_steps(
                    leaf, request.max_decode_steps
                )
        return skipped

    def forget(self, request: ScheduledRequest) -> None:
        known = self._requests.pop(request.req.rid, None)
        self._by_leaf.pop(request.leaf, None)
        if known is None:
            return
        self.adapters[request.adapter] -= 1
        if not self.adapters[request.adapter]:
            del self.adapters[request.adapter]
        if request.leaf >= 0 or request.part:
            return
        # A later plan may still have it.
        place = request.number - self._leaves.lowest
        if 0 <= place < _MOST_ENDED:
            self._ended.extend(bytes(max(0, place + 1 - len(self._ended))))
            self._ended[place] = 1

    def density_at(self, request: ScheduledRequest | None) -> float:
        density = self.plan.density
        if density is None or request is None or request.leaf < 0:
            return 1.0
        return float(density[request.position])

    def requests(self) -> Iterator[ScheduledRequest]:
        yield from self._requests.values()

    # Leaders and followers ------------------------------------------------------------

    def start(self, request: ScheduledRequest, cached_len: int) -> None:
        """A planned request is admitted with ``cached_len`` tokens in the cache. It
        computes its other prefixes."""
        self.uses.start(request, cached_len)
        self._lead_elsewhere(request)

    def lead(self, request: ScheduledRequest, cached_len: int) -> None:
        """The cache turned out to hold ``cached_len`` tokens."""
        self.uses.lead(request, cached_len)
        self._lead_elsewhere(request)

    def _lead_elsewhere(self, request: ScheduledRequest) -> None:
        for node in request.leading:
            for other, at in self.elsewhere(node):
                other.uses.await_node(at, request)

    def leave(self, request: ScheduledRequest, *, offloaded: bool) -> None:
        """A running planned request ended, or gave its KV back and will return
        (``offloaded``). Nobody computes the prefixes now that it was computing."""
        nodes = self.uses.leave(request, offloaded=offloaded)
        self.release_followers(nodes)
        for node in nodes:
            for other, at in self.elsewhere(node):
                other.no_longer_awaits(at, self)

    def no_longer_awaits(self, node: int, job: JobState) -> None:
        """No request of another job computes a node for this one any more."""
        leader = self.uses.computing.get(node)
        if leader is not None and leader.work is job.done:
            del self.uses.computing[node]
            self.release_followers([node])

    def use_now(self, node: int) -> None:
        """Another job has a prefix in the cache: the requests that need it here go first."""
        leaves = self.uses.leaves(node)
        for leaf in leaves if len(leaves) <= _MOST_AHEAD else ():
            request = self._by_leaf.get(leaf)
            if request is not None and not request.running:
                self.backlog.move_ahead(request)

    def follow(self, request: ScheduledRequest, node: int) -> None:
        """Let a waiting request wait until ``node`` is computed."""
        self.backlog.remove(request)
        self._followers.setdefault(node, []).append(request)
        self.num_followers += 1

    def release_followers(self, nodes: list[int]) -> None:
        """Return the followers of ``nodes`` to the backlog; no request computes them now."""
        for node in nodes:
            for request in self._followers.pop(node, []):
                self.num_followers -= 1
                self.backlog.add_again(request)

    def take(self, request: ScheduledRequest) -> None:
        if request.waiting:
            self.backlog.remove(request)
            return
        if request in (parked := self._without_adapter.get(request.adapter, [])):
            parked.remove(request)
            self.num_without_adapter -= 1
            return
        for requests in self._followers.values():
            if request in requests:
                requests.remove(request)
                self.num_followers -= 1
                return

    # Adapters -------------------------------------------------------------------------

    def await_adapter(self, request: ScheduledRequest) -> None:
        self.backlog.remove(request)
        self._without_adapter.setdefault(request.adapter, []).append(request)
        self.num_without_adapter += 1

    def awaited_adapters(self) -> list[str | None]:
        first = {
            adapter: min((each.position, each.arrival) for each in requests)
            for adapter, requests in self._without_adapter.items()
            if requests
        }
        return sorted(first, key=first.__getitem__)

    def release_adapter(self, adapter: str | None) -> None:
        for request in self._without_adapter.pop(adapter, []):
            self.num_without_adapter -= 1
            self.backlog.add(request)

    # A new plan -----------------------------------------------------------------------

    def replan(self, plan: JobPlan) -> None:
        """Take another order and other estimates for the same requests and tree. Running
        requests keep the estimates they were admitted with."""
        self.plan = plan
        self.uses.reorder(plan)
        self.work.replan(plan)
        self.done.bias = LengthBias()  # the new estimates have learnt from the answers
        for request in self._requests.values():
            if request.leaf < 0:
                continue
            request.position = int(plan.position[request.leaf])
            if not request.running and request.steps == 0:
                request.est_decode_steps = self._est_decode_steps(
                    request.leaf, request.max_decode_steps
                )
        self._reorder(plan)

    def _reorder(self, plan: JobPlan) -> None:
        """Sort the waiting requests by a new plan, perhaps by another rule."""
        old = self.backlog
        if old.rule == plan.length_rule:
            old.reorder(plan)
            return
        self.backlog = self._make_backlog(plan)
        for request in old:
            self.backlog.add(request)
        for request in self._requests.values():
            if request.running:
                request.backlog = self.backlog
                self.backlog.runs(request)

    def extend(
        self, plan: JobPlan, cached_len: Callable[[ScheduledRequest], int]
    ) -> Extension:
        """Take a plan that covers other requests of the job, usually more of them.

        Requests that wait get their places in the new plan, also those that arrived before
        a plan had them, and running ones count for their prefixes in the new tree. A
        request that is left out and has not ended is unplanned from now on. The time is
        linear in the requests of both plans.

        Args:
            cached_len: tokens of a running request's prompt that the cache holds.
        """
        old, self.plan = self.plan, plan
        followers = [*self.followers()]
        leaves = LeafNumbers(plan.number)
        moved = leaves.of_all(old.number)
        ended = np.flatnonzero(np.frombuffer(bytes(self._ended), np.uint8))
        over = leaves.of_all((ended + self._leaves.lowest).astype(np.int32))
        over = over[over >= 0]
        first, self._leaves = self._leaves.lowest, leaves
        if leaves.lowest > first:
            del self._ended[: leaves.lowest - first]
        elif leaves.lowest < first:
            self._ended[:0] = bytes(first - leaves.lowest)
        self.uses, released = self.uses.extended(plan, self._page_size, moved, over)
        self.work.extend(plan, old, moved, over)
        self.done.bias.forget_subtrees()
        self._subtree = subtrees(plan.parent, plan.leaf_begin, plan.leaf_end)
        running, resized = [], []
        self._by_leaf.clear()
        for request in self._requests.values():
            own = request.own
            request.leading = []
            skipped = self._place(request)
            if skipped >= 0:
                self.uses.started[skipped] = True
            if not request.running:
                continue
            if own != request.own:
                resized.append((request, own))
            if request.leaf >= 0:
                self.uses.resume(request)
                running.append(request)
        released += self.uses.settle()
        for request in running:
            self.uses.lead(request, cached_len(request))
        self._followers.clear()
        self.num_followers = 0
        self._reorder(plan)
        for request in followers:
            node = self.uses.blocked_by(request.node)
            if node:
                self._followers.setdefault(node, []).append(request)
                self.num_followers += 1
            else:
                self.backlog.add(request)
        return Extension(released, running, resized)

    def _est_decode_steps(self, leaf: int, max_decode_steps: int) -> int:
        return min(int(float(self.plan.est_decode_steps[leaf]) + 0.5), max_decode_steps)
