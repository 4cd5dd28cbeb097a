"""The leaf of each request of a plan, for tests that look many up."""

from __future__ import annotations

import numpy as np

from sglang_batch.planner.requests import Int32s
from sglang_batch.scheduling.job_plan import JobPlan, LeafNumbers


def leaves_of(plan: JobPlan) -> Int32s:
    """By number, int32, -1 for a request that is not planned here."""
    numbers = np.arange(plan.number.max(initial=-1) + 1, dtype=np.int32)
    return LeafNumbers(plan.number).of_all(numbers)
