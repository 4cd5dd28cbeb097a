"""The remaining work of a job: the work that its plan estimates, less the work done.

The plan's sums are corrected request by request as output lengths become known. The
difference becomes small towards the end of a job. With the estimates of requests that
have ended still in the sum, it would mislead the dual scanner there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..planner.requests import Floats, Int64s
from .job_plan import JobPlan
from .scheduled_request import ScheduledRequest

# Beyond this ratio, the density makes no difference to the dual scanner.
_DENSITY_RANGE = 1e6


class WorkLeft:
    """Compute and KV read time of one job, in seconds by the plan's cost model."""

    def __init__(self, plan: JobPlan) -> None:
        self._done_compute_s = 0.0
        self._done_kv_read_s = 0.0
        self._ended = np.zeros(plan.num_requests, np.bool_)
        self._follow(plan)

    def _follow(self, plan: JobPlan) -> None:
        self._cost = plan.cost
        self._read_len = plan.read_len
        self._steps = plan.est_decode_steps.copy()
        self._reads = (
            plan.read_len * plan.est_decode_steps + plan.est_decode_steps_sq / 2
        )
        self._compute_s = plan.compute_s
        self._kv_read_s = plan.kv_read_s

    def replan(self, plan: JobPlan) -> None:
        """Take a new plan of the same requests, which may still count ended requests."""
        ended = np.flatnonzero(self._ended)
        steps = self._steps[ended]
        self._follow(plan)
        self._correct(ended, steps)

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
        steps = float(request.steps)
        self._compute_s += (request.own + steps) * self._cost.token_time_s
        reads = request.read_len * steps + _own_reads(steps)
        self._kv_read_s += reads * self._cost.kv_read_time_s

    def _correct(self, leaves: Int64s, steps: Floats) -> None:
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
    def density(self) -> float:
        """Compute time over KV read time of the remaining work, within 1e-6 to 1e6."""
        reads = max(self._kv_read_s - self._done_kv_read_s, 1e-9)
        density = max(self._compute_s - self._done_compute_s, 0.0) / reads
        return min(max(density, 1.0 / _DENSITY_RANGE), _DENSITY_RANGE)


def _own_reads(steps: Any) -> Any:
    """Tokens of its own answer that a request reads in this number of decode steps."""
    return steps * (steps + 1) / 2
