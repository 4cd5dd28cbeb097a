"""A job that the workers of a fleet know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..planner.machine_model import Machine
from ..scheduling.job_plan import JobPlan, unplanned
from . import plan_bytes
from .messages import OpenJob, SetPriority


@dataclass(slots=True)
class FleetJob:
    """A job's last plans, and who hears which of its lines run.

    plans: one for each slot of the fleet, or one without requests for all. Empty before the
        first.
    ending: ids of samples that are to end early, those not sent yet included.
    """

    plans: Sequence[JobPlan]
    on_joined: Callable[[list[int]], None]
    priority: int = 0
    ending: set[str] = field(default_factory=set)

    def commands(
        self, job_id: str, slots: Sequence[int], machine: Machine
    ) -> list[OpenJob | SetPriority]:
        """What opens the job at a worker, or gives it the last plans.

        Args:
            slots: the fleet's numbers of the worker's replicas. One that has no plan yet
                gets one without requests.
            machine: that jobs are planned for.
        """
        if not self.plans:
            return []
        if len(self.plans) == 1 and not self.plans[0].num_requests:
            plans = [self.plans[0]] * len(slots)
        else:
            plans = [
                self.plans[slot] if slot < len(self.plans) else unplanned(machine)
                for slot in slots
            ]
        opening = OpenJob(job_id, [plan_bytes.to_bytes(plan) for plan in plans])
        if self.priority:
            return [opening, SetPriority(job_id, self.priority)]
        return [opening]
