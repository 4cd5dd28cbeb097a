"""The work of one job: done and left, and how far its estimates are off.

:class:`JobWork` counts it in seconds by the cost model, for fair shares of the engine. A
request is charged the steps that the job's last answers make likely, since estimates may be
far off. :class:`WorkLeft` is the work that the plan estimates, less the work done,
corrected as output lengths become known: estimates of requests that have ended would
mislead the dual scanner towards the end of a job. :class:`LengthBias` compares the tokens
that were observed and estimated. A running request that outlives its estimate is counted at
once, or the long answers would be missing while the short ones come in.

Every sum changes by event, so that no step iterates over the running requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..planner.requests import Floats, Int32s, Int64s
from .job_plan import JobPlan, StepCost
from .scheduled_request import ScheduledRequest

# Answers of a job that the usual length of all jobs counts as.
_USUAL = 4.0


class JobWork:
    """Work that was done for a job's requests, and that they are expected to need.

    The job with the least of it is next, so that a job with long answers does not get a
    place for each place of a job with short ones.

    Attributes:
        bias: how far its estimates have been off.
        done_s: compute and KV read time of the steps so far.
        charged_s: the same of requests that left, and all of the running ones.
        decoding: running requests of the job that decode.
        read_base: tokens of KV that they read in a step, less the decode clock for each. It
            is the same in every step.
    """

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.bias = LengthBias()
        self.done_s = 0.0
        self.charged_s = 0.0
        self.decoding = 0
        self.read_base = 0
        self._step_compute_s = 0.0

    def raise_by(self, seconds: float) -> None:
        """Count work that was not done: a job is not owed the time without requests."""
        self.done_s += seconds
        self.charged_s += seconds

    @property
    def share_s(self) -> float:
        """Work that was done or begun. Requests may have outlived their charge."""
        return max(self.charged_s, self.done_s)

    def expected_s(
        self, request: ScheduledRequest, kept: int, usual_steps: float | None
    ) -> float:
        """Work of a waiting request.

        Args:
            kept: tokens of its prompt in the cache. A resumed request has all its tokens:
                -1.
            usual_steps: mean decode steps of the last answers of all jobs, if any.
        """
        seconds = self._decode_s(
            request, request.steps, self._likely_steps(request, usual_steps)
        )
        if kept >= 0:
            prompt = max(1, request.input_len + request.steps - kept)
            seconds += self._prompt_s(prompt, kept)
        return seconds

    def _likely_steps(
        self, request: ScheduledRequest, usual_steps: float | None
    ) -> int:
        steps = float(request.est_decode_steps)
        if request.steps == 0 and steps < request.max_decode_steps:
            lately = self.bias.job
            if lately.weight:
                steps *= lately.observed / lately.estimated
            if usual_steps is not None:
                usual = _USUAL * usual_steps
                steps = (lately.weight * steps + usual) / (lately.weight + _USUAL)
        return max(min(int(steps + 0.5), request.max_decode_steps), request.steps)

    # A running request ----------------------------------------------------------------

    def start(
        self, request: ScheduledRequest, kept: int, usual_steps: float | None
    ) -> None:
        """A request joins; see :meth:`expected_s`."""
        request.charged_s = self.expected_s(request, kept, usual_steps)
        request.charged_steps = self._likely_steps(request, usual_steps)
        request.prompt_s = 0.0
        self.charged_s += request.charged_s

    def prefilled(
        self, request: ScheduledRequest, tokens: int, before: int, media: int
    ) -> None:
        """``tokens`` of a prompt are computed in this step, after ``before`` others.
        ``media`` of them are placeholders of images or sounds."""
        seconds = self._prompt_s(tokens, before)
        seconds += media * self.cost.encoder_token_time_s
        request.prompt_s += seconds
        self._step_compute_s += seconds

    def estimate_raised(self, request: ScheduledRequest) -> None:
        """A running request takes more decode steps than it was estimated at."""
        if request.est_decode_steps > request.charged_steps:
            more = self._decode_s(
                request, request.charged_steps, request.est_decode_steps
            )
            request.charged_steps = request.est_decode_steps
            request.charged_s += more
            self.charged_s += more

    def decodes(self, request: ScheduledRequest, count: int) -> None:
        """A running request begins to decode (1), or no longer does (-1)."""
        self.decoding += count
        self.read_base += count * read_base(request)

    def corrected(self, request: ScheduledRequest, counted: int, steps: int) -> None:
        """A request was counted with ``counted`` decode steps and has taken ``steps``."""
        if steps < counted:
            self.done_s -= self._decode_s(request, steps, counted)
        else:
            self.done_s += self._decode_s(request, counted, steps)

    def leave(self, request: ScheduledRequest, first: int, steps: int) -> None:
        """A running request ended or gives its KV back: charge it for its work, with
        ``first`` decode steps when it joined and ``steps`` now."""
        did = request.prompt_s + self._decode_s(request, first, steps)
        self.charged_s += did - request.charged_s
        request.charged_s = request.prompt_s = 0.0

    # A step ---------------------------------------------------------------------------

    def end_step(self, clock: int, *, decodes: bool) -> tuple[float, float]:
        """Count a step that begins at ``clock``. Returns its compute and its KV read time,
        in seconds."""
        compute_s, self._step_compute_s = self._step_compute_s, 0.0
        kv_read_s = 0.0
        if decodes:
            compute_s += self.decoding * self.cost.token_time_s
            reads = self.read_base + self.decoding * clock
            kv_read_s = reads * self.cost.kv_read_time_s
        self.done_s += compute_s + kv_read_s
        return compute_s, kv_read_s

    # Costs ----------------------------------------------------------------------------

    def _prompt_s(self, tokens: int, before: int) -> float:
        attended = tokens * (2 * before + tokens)
        return tokens * self.cost.token_time_s + attended * self.cost.attention_time_s

    def _decode_s(self, request: ScheduledRequest, first: int, last: int) -> float:
        steps = last - first
        own = (last * (last + 1) - first * (first + 1)) // 2
        reads = steps * request.read_len + own
        return steps * self.cost.token_time_s + reads * self.cost.kv_read_time_s


def read_base(request: ScheduledRequest) -> int:
    """KV that a decoding request reads in a step, in tokens, less the decode clock."""
    return request.read_len + request.steps + 1 - request.begin


# Beyond this ratio, the density makes no difference to the dual scanner.
_DENSITY_RANGE = 1e6


class WorkLeft:
    """Compute and KV read time of one job, in seconds by the plan's cost model."""

    def __init__(self, plan: JobPlan) -> None:
        self._done_compute_s = 0.0
        self._done_kv_read_s = 0.0
        # Of requests that ended and that no plan counts.
        self._uncounted_compute_s = 0.0
        self._uncounted_kv_read_s = 0.0
        self._ended = np.zeros(plan.num_requests, np.bool_)
        self._follow(plan)

    def _follow(self, plan: JobPlan) -> None:
        self._cost = plan.cost
        self._read_len = plan.read_len
        self._steps = plan.est_decode_steps.astype(np.float64)
        self._reads = plan.read_len * self._steps + plan.est_decode_steps_sq / 2
        self._compute_s = plan.compute_s + self._uncounted_compute_s
        self._kv_read_s = plan.kv_read_s + self._uncounted_kv_read_s

    def replan(self, plan: JobPlan) -> None:
        """Take a new plan of the same requests, which may still count ended requests."""
        ended = np.flatnonzero(self._ended)
        steps = self._steps[ended]
        self._follow(plan)
        self._correct(ended, steps)

    def extend(self, plan: JobPlan, old: JobPlan, moved: Int32s, over: Int32s) -> None:
        """Take a plan of other requests.

        Args:
            moved: int32, the new leaf of each leaf of the ``old`` plan, -1 for none.
            over: new leaves of requests that ended before a plan counted them.
        """
        left_out = np.flatnonzero(self._ended & (moved < 0))
        own = old.input_len[left_out] - old.depth[old.node[left_out]]
        self._ended_uncounted(
            float((own + self._steps[left_out]).sum()),
            float(self._reads[left_out].sum()),
        )
        ended = np.flatnonzero(self._ended & (moved >= 0))
        steps = self._steps[ended]
        self._ended = np.zeros(plan.num_requests, np.bool_)
        self._follow(plan)
        self._correct(moved[ended], steps)
        self._correct(over, np.zeros(len(over)))
        self._ended[moved[ended]] = self._ended[over] = True

    def _ended_uncounted(self, tokens: float, reads: float) -> None:
        self._uncounted_compute_s += tokens * self._cost.token_time_s
        self._uncounted_kv_read_s += reads * self._cost.kv_read_time_s

    def apply_estimates(self, requests: Sequence[ScheduledRequest]) -> None:
        """Count planned requests by their own estimates in place of the plan's."""
        planned = [request for request in requests if request.leaf >= 0]
        if planned:
            leaves = np.array([request.leaf for request in planned])
            self._correct(
                leaves, np.array([float(x.est_decode_steps) for x in planned])
            )

    def ended(self, request: ScheduledRequest) -> None:
        """Count ``request.steps`` for a request that ended or will never run."""
        if request.leaf >= 0:
            self._correct(np.array([request.leaf]), np.array([float(request.steps)]))
            self._ended[request.leaf] = True
            return
        # No plan has counted it.
        before = self._uncounted_compute_s, self._uncounted_kv_read_s
        steps = float(request.steps)
        reads = request.read_len * steps + _own_reads(steps)
        self._ended_uncounted(request.own + steps, reads)
        self._compute_s += self._uncounted_compute_s - before[0]
        self._kv_read_s += self._uncounted_kv_read_s - before[1]

    def expected_again(self, request: ScheduledRequest) -> None:
        """A planned request that was not to run any more will run after all."""
        steps = np.array([float(request.est_decode_steps)])
        self._correct(np.array([request.leaf]), steps)
        self._ended[request.leaf] = False

    def _correct(self, leaves: Int32s | Int64s, steps: Floats) -> None:
        reads = self._read_len[leaves] * steps + _own_reads(steps)
        more_steps = float((steps - self._steps[leaves]).sum())
        more_reads = float((reads - self._reads[leaves]).sum())
        self._compute_s += more_steps * self._cost.token_time_s
        self._kv_read_s += more_reads * self._cost.kv_read_time_s
        self._steps[leaves] = steps
        self._reads[leaves] = reads

    def did(self, compute_s: float, kv_read_s: float) -> None:
        self._done_compute_s += compute_s
        self._done_kv_read_s += kv_read_s

    @property
    def compute_s(self) -> float:
        return max(self._compute_s - self._done_compute_s, 0.0)

    @property
    def kv_read_s(self) -> float:
        return max(self._kv_read_s - self._done_kv_read_s, 0.0)


def density_of(works: Iterable[WorkLeft]) -> float:
    """Compute time over KV read time of the remaining work of all, 1e-6 to 1e6."""
    compute_s = kv_read_s = 0.0
    for work in works:
        compute_s += work.compute_s
        kv_read_s += work.kv_read_s
    density = compute_s / max(kv_read_s, 1e-9)
    return min(max(density, 1.0 / _DENSITY_RANGE), _DENSITY_RANGE)


def _own_reads(steps: Any) -> Any:
    """Tokens of its own answer that a request reads in this number of decode steps."""
    return steps * (steps + 1) / 2


# Answers after which an observation counts half.
HALF_LIFE = 32
_KEEP = 0.5 ** (1.0 / HALF_LIFE)
# Estimates are raised by at most this much.
BIAS_MAX = 16.0
# Tokens of a job that count as estimated correctly before anything was observed.
_PRIOR = 32.0
# Requests with which a subtree has sums of its own.
_SUBTREE = 64
# Answers that the job's sums count as in those of a subtree.
_SHRINKAGE = 8.0


@dataclass(slots=True)
class LengthSums:
    """Observed and estimated tokens of the last answers, the older ones counting less.

    learnt: answers so far, which date each observation.
    weight: sum of the weights of all answers, at most ``1 / (1 - _KEEP)``, about 47.
    """

    observed: float = 0.0
    estimated: float = 0.0
    weight: float = 0.0
    learnt: int = 0

    def learn(self, observed: float, estimated: float) -> None:
        """An answer, which no longer runs or has outlived its estimate."""
        self.observed = _KEEP * self.observed + observed
        self.estimated = _KEEP * self.estimated + estimated
        self.weight = _KEEP * self.weight + 1.0
        self.learnt += 1

    def correct(self, more: float, since: int) -> None:
        """An answer that was the ``since``-th has ``more`` tokens than was learnt then."""
        self.observed += more * _KEEP ** (self.learnt - since)


class LengthBias:
    """The sums of one job and of its larger subtrees, or of all online requests. ``job``
    has all of its requests."""

    def __init__(self) -> None:
        self.job = LengthSums()
        self._subtrees: dict[int, LengthSums] = {}

    def factor(self, request: ScheduledRequest) -> float:
        """The factor by which a request's estimate is too low, at least 1."""
        job = self.job
        factor = (job.observed + _PRIOR) / (job.estimated + _PRIOR)
        of_subtree = self._subtrees.get(request.subtree)
        if of_subtree is not None:
            prior = _SHRINKAGE * (request.est_decode_steps + 1)
            factor = (of_subtree.observed + prior * factor) / (
                of_subtree.estimated + prior
            )
        return min(max(1.0, factor), BIAS_MAX)

    def learn(self, request: ScheduledRequest, steps: int) -> None:
        """A request takes at least ``steps`` decode steps, or took exactly these."""
        observed, estimated = steps + 1, request.initial_est_decode_steps + 1
        sums = [self.job]
        if request.subtree > 0:
            of_subtree = self._subtrees.get(request.subtree)
            if of_subtree is None:
                of_subtree = self._subtrees[request.subtree] = LengthSums()
            sums.append(of_subtree)
        if request.counted:
            for each, since in request.counted_in:
                each.correct(observed - request.counted, since)
        else:
            for each in sums:
                each.learn(observed, estimated)
            request.counted_in = tuple((each, each.learnt) for each in sums)
        request.counted = observed

    def forget_subtrees(self) -> None:
        """The plan has another tree."""
        self._subtrees.clear()


def subtrees(parent: Int32s, leaf_begin: Int32s, leaf_end: Int32s) -> Int32s:
    """For each node the smallest large subtree around it, int32 ``[m]``. 0: the whole job.

    Args:
        parent: int32 ``[m]``, -1 at the root.
        leaf_begin, leaf_end: int32 ``[m]``, the range of the leaves below each node.
    """
    large = leaf_end - leaf_begin >= _SUBTREE
    root: Int32s = np.where(large, np.arange(len(parent)), parent).astype(np.int32)
    root[:1] = 0
    while True:
        above = root[root]
        if np.array_equal(above, root):
            return root
        root = above
