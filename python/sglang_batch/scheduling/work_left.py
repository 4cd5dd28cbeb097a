"""The remaining work of a job: the work that its plan estimates, less the work done.

The plan's sums are corrected request by request as output lengths become known. The
difference becomes small towards the end of a job. With the estimates of requests that
have ended still in the sum, it would mislead the dual scanner there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..planner.requests import Floats, Int32s, Int64s
from .job_plan import JobPlan
from .scheduled_request import ScheduledRequest

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
        """Count the work of a step, in seconds."""
        self._done_compute_s += compute_s
        self._done_kv_read_s += kv_read_s

    @property
    def compute_s(self) -> float:
        """Compute time of the remaining work."""
        return max(self._compute_s - self._done_compute_s, 0.0)

    @property
    def kv_read_s(self) -> float:
        """KV read time of the remaining work."""
        return max(self._kv_read_s - self._done_kv_read_s, 0.0)

    @property
    def density(self) -> float:
        """See :func:`density_of`."""
        return density_of([self])


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
