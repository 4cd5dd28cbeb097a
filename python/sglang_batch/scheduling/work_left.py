"""The work of a job that is left: what its plan expects, less what was done.

The plan's sums are corrected request by request as lengths become known. What is left
is a difference that grows small towards the end of a job, so that a sum which kept the
estimates of requests that have ended would turn the dual scanner the wrong way there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..planner.requests import Floats, Int64s
from .job_plan import JobPlan
from .line import Line

# Beyond this, more of one kind of work than of the other makes no difference.
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
        self._steps = plan.steps.copy()
        self._reads = plan.read_len * plan.steps + plan.steps_sq / 2
        self._compute_s = plan.compute_s
        self._kv_read_s = plan.kv_read_s

    def replan(self, plan: JobPlan) -> None:
        """A new plan of the same requests. It may not know yet which have ended."""
        ended = np.flatnonzero(self._ended)
        steps = self._steps[ended]
        self._follow(plan)
        self._correct(ended, steps)

    def expect(self, lines: Sequence[Line]) -> None:
        """Planned requests will take their estimates, not what the plan expected."""
        planned = [line for line in lines if line.leaf >= 0]
        if planned:
            leaves = np.array([line.leaf for line in planned])
            self._correct(leaves, np.array([float(x.estimate) for x in planned]))

    def ended(self, line: Line) -> None:
        """A request came to its end, or will never run, after ``line.steps`` steps."""
        if line.leaf >= 0:
            self._correct(np.array([line.leaf]), np.array([float(line.steps)]))
            self._ended[line.leaf] = True
            return
        # No plan had counted it.
        steps = float(line.steps)
        self._compute_s += (line.own + steps) * self._cost.token_time_s
        reads = line.read_len * steps + _own_reads(steps)
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
        """A step took so long."""
        self._done_compute_s += compute_s
        self._done_kv_read_s += kv_read_s

    @property
    def density(self) -> float:
        """Compute over KV read time of what is left, within 1e-6 to 1e6."""
        reads = max(self._kv_read_s - self._done_kv_read_s, 1e-9)
        density = max(self._compute_s - self._done_compute_s, 0.0) / reads
        return min(max(density, 1.0 / _DENSITY_RANGE), _DENSITY_RANGE)


def _own_reads(steps: Any) -> Any:
    """Tokens of its own answer that a request reads in so many decode steps."""
    return steps * (steps + 1) / 2
