"""The plan of one replica's shard of a job."""

from __future__ import annotations

from dataclasses import dataclass

from ..planner.machine_model import Machine
from ..planner.plan import Plan
from ..planner.requests import Int64s
from ..scheduling.job_plan import JobPlan, job_plan


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The requests that one replica runs, and their order.

    plan: refers to its requests by their positions in ``numbers``.
    numbers: int64 ``[n]``, the number of each request in the job.
    """

    plan: Plan
    numbers: Int64s

    @property
    def both_ends(self) -> bool:
        """Whether requests are taken from both ends of the order."""
        return self.plan.scan.density is not None

    @property
    def sides(self) -> tuple[Int64s, Int64s]:
        """Numbers of the left and the right side, int64, each in the order of sending.

        An order that is not taken from both ends is all left.
        """
        scan = self.plan.scan
        order = self.numbers[scan.requests]
        num_left = scan.num_left if self.both_ends else len(order)
        return order[:num_left], order[num_left:][::-1]

    @property
    def too_large(self) -> Int64s:
        """Numbers of the requests that need more KV than the replica has, int64."""
        return self.numbers[self.plan.too_large]

    def for_scheduler(self, machine: Machine) -> JobPlan:
        return job_plan(self.plan, self.numbers, machine)
