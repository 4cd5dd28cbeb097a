"""A job inside the scheduler: its plan, waiting requests and shared prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .backlog import Backlog
from .job_plan import JobPlan
from .prefix_uses import PrefixUses
from .scheduled_request import ScheduledRequest
from .work_left import WorkLeft

# Position of unplanned requests: after all others, in the order of arrival.
UNPLANNED_POSITION = 1 << 40
# Estimate for a request without any other.
DEFAULT_EST_DECODE_STEPS = 256


class JobState:
    """One open job.

    Attributes:
        uses: its shared prefixes.
        backlog: requests that may be admitted.
        work: its remaining compute and KV reads.
        num_followers: requests that wait for a prefix to be computed.
        pace, left_blocked, saved_tokens: state of the dual scanner.
        priority: among open jobs, requests of the job with the highest join first.
        served: tokens of it that were admitted. Among jobs of one priority, the one that
            was served least is next.
    """

    def __init__(self, job_id: str, plan: JobPlan, page_size: int) -> None:
        self.job_id = job_id
        self.plan = plan
        self.uses = PrefixUses(plan, page_size)
        self.backlog = Backlog(plan.num_left, both_ends=plan.density is not None)
        self._followers: dict[int, list[ScheduledRequest]] = {}
        self.num_followers = 0
        self._requests: dict[
            str, ScheduledRequest
        ] = {}  # by request id, until they end
        self.work = WorkLeft(plan)
        self.pace = 1.0
        self.left_blocked = False
        self.saved_tokens = 0
        self.priority = 0
        self.served = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        return self.backlog.count + self.num_followers

    @property
    def waiting_tokens(self) -> int:
        return self.backlog.tokens + sum(
            request.input_len for request in self.followers()
        )

    @property
    def dual(self) -> bool:
        return self.plan.density is not None

    def waiting(self) -> Iterator[ScheduledRequest]:
        """All waiting requests, including followers."""
        yield from self.backlog
        yield from self.followers()

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
    ) -> ScheduledRequest:
        """Add a request of this job that arrived to the backlog.

        Args:
            number: its number in the job, -1 if unknown.
            part: the index of this sequence among those of a request with several. A
                plan has one of them, and the others get its position.
        """
        plan = self.plan
        leaf = int(plan.leaf[number]) if 0 <= number < len(plan.leaf) else -1
        position = int(plan.position[leaf]) if leaf >= 0 else UNPLANNED_POSITION
        if part:
            leaf = -1
        if leaf >= 0 and plan.input_len[leaf] != input_len:
            # The engine has another prompt than was planned.
            self.uses.skip_leaf(leaf, int(plan.node[leaf]))
            leaf = -1
        if leaf < 0:
            est_decode_steps = min(max_decode_steps, DEFAULT_EST_DECODE_STEPS)
            request = ScheduledRequest(
                req, -1, 0, position, input_len, input_len, max_decode_steps,
                est_decode_steps,
            )  # fmt: skip
        else:
            node = int(plan.node[leaf])
            request = ScheduledRequest(
                req=req,
                leaf=leaf,
                node=node,
                position=position,
                input_len=input_len,
                own=input_len - int(self.uses.depth[node]),
                max_decode_steps=max_decode_steps,
                est_decode_steps=self._est_decode_steps(leaf, max_decode_steps),
                read_len=int(plan.read_len[leaf]),
            )
        self._requests[req.rid] = request
        self.backlog.add(request)
        return request

    def forget(self, request: ScheduledRequest) -> None:
        """Remove a request that ended or was aborted."""
        self._requests.pop(request.req.rid, None)

    def density_at(self, request: ScheduledRequest | None) -> float:
        density = self.plan.density
        if density is None or request is None or request.leaf < 0:
            return 1.0
        return float(density[request.position])

    # Followers ------------------------------------------------------------------------

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
                self.backlog.add(request)

    def take(self, request: ScheduledRequest) -> None:
        """Remove a waiting request, from the backlog or from the followers."""
        if request.waiting:
            self.backlog.remove(request)
            return
        for requests in self._followers.values():
            if request in requests:
                requests.remove(request)
                self.num_followers -= 1
                return

    # A new plan -----------------------------------------------------------------------

    def replan(self, plan: JobPlan) -> None:
        """Take another order and other estimates for the same requests and tree.

        Running requests keep the estimates they were admitted with.
        """
        self.plan = plan
        self.uses.reorder(plan)
        self.work.replan(plan)
        for request in self._requests.values():
            if request.leaf < 0:
                continue
            request.position = int(plan.position[request.leaf])
            if not request.running and request.steps == 0:
                request.est_decode_steps = self._est_decode_steps(
                    request.leaf, request.max_decode_steps
                )
        self.backlog.reorder(plan.num_left, both_ends=plan.density is not None)

    def _est_decode_steps(self, leaf: int, max_decode_steps: int) -> int:
        """The plan's estimate of a request, rounded."""
        return min(int(float(self.plan.est_decode_steps[leaf]) + 0.5), max_decode_steps)
