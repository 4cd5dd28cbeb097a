"""Jobs for the scheduler's tests: plans by hand, prompts and requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from plan_leaves import leaves_of

from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.machine_model import EngineLimits, Machine
from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree
from sglang_batch.scheduling.job_plan import JobPlan, unplanned
from sglang_batch.scheduling.job_state import JobState
from sglang_batch.scheduling.scheduled_request import ScheduledRequest

Prompt = tuple[int, ...]

MACHINE = Machine(
    CostModel(token_time_s=1e-5, kv_read_time_s=1e-8),
    EngineLimits(kv_capacity_tokens=100_000, step_tokens=1024, max_running=256),
)


@dataclass(eq=False)
class Req:
    """The part of SGLang's request that is used without SGLang."""

    rid: str
    output_ids: list[int] = field(default_factory=list)


def plan_of(
    prompts: Sequence[Prompt],
    *,
    position: Sequence[int] | None = None,
    density: Sequence[float] | None = None,
    num_left: int = 0,
    est_decode_steps: float = 8.0,
    numbers: Sequence[int] | None = None,
) -> JobPlan:
    """A plan of prompts, all of which are estimated at ``est_decode_steps``.

    position: by request, in the order; that of the tree if left out.
    density: by position, of an order that is taken from both ends.
    numbers: of the requests in the job.
    """
    n = len(prompts)
    number = np.arange(n) if numbers is None else np.array(numbers)
    number = number.astype(np.int32)
    tokens = np.array([t for prompt in prompts for t in prompt], dtype=np.int32)
    offsets = np.cumsum([0, *map(len, prompts)], dtype=np.int64)
    tree = build_prefix_tree(tokens, offsets)
    by_leaf = np.arange(n) if position is None else np.array(position)[tree.order]
    return replace(
        unplanned(MACHINE),
        policy="dfs" if density is None else "dual-scan",
        number=number[tree.order],
        position=by_leaf.astype(np.int32),
        node=tree.leaf_parent.astype(np.int32),
        input_len=tree.input_len,
        read_len=tree.input_len,
        est_decode_steps=np.full(n, est_decode_steps, np.float32),
        est_decode_steps_sq=np.full(n, est_decode_steps**2, np.float32),
        parent=tree.parent,
        depth=tree.depth,
        leaf_begin=tree.leaf_begin.astype(np.int32),
        leaf_end=tree.leaf_end.astype(np.int32),
        density=None if density is None else np.array(density, np.float32),
        num_left=num_left,
        compute_s=1.0,
        kv_read_s=1.0,
    )


def random_prompts(random: Random, n: int, step: int = 1) -> list[Prompt]:
    """Prompts that share prefixes of many lengths, stretched by ``step``."""
    prompts: list[Prompt] = []
    for number in range(n):
        start: Prompt = ()
        if prompts and random.random() < 0.85:
            other = random.choice(prompts)
            start = other[: random.randint(0, len(other))]
        tail = random.randint(0, 4) * step + random.randint(0, step - 1)
        prompts.append((*start, *(1000 * number + i for i in range(tail))))
    return prompts


def job_of(plan: JobPlan, page_size: int = 1) -> JobState:
    return JobState("job", plan, page_size)


def arrive(
    job: JobState, number: int, max_decode_steps: int = 1000
) -> ScheduledRequest:
    """Request ``number`` of the plan arrives."""
    return _arrive(job, number, int(leaves_of(job.plan)[number]), max_decode_steps)


def arrive_all(job: JobState, max_decode_steps: int = 1000) -> list[ScheduledRequest]:
    # Finding all leaves takes as long as finding one.
    leaves = leaves_of(job.plan).tolist()
    return [
        _arrive(job, number, leaf, max_decode_steps)
        for number, leaf in enumerate(leaves)
    ]


def _arrive(
    job: JobState, number: int, leaf: int, max_decode_steps: int
) -> ScheduledRequest:
    input_len = int(job.plan.input_len[leaf])
    return job.add(Req(f"r{number}"), number, input_len, max_decode_steps)


def request_of(
    position: int = 0,
    *,
    own: int = 10,
    est_decode_steps: int = 8,
    max_decode_steps: int = 1000,
    leaf: int = 0,
    side: int = 0,
) -> ScheduledRequest:
    """A request without a job."""
    req = Req(f"position-{position}")
    return ScheduledRequest(
        req, leaf, 0, position, own, own, max_decode_steps, est_decode_steps, side
    )


def waiting_of(job: JobState) -> list[ScheduledRequest]:
    """All requests of a job that wait, in its backlog or aside."""
    return [*job.backlog, *job.outside_backlog()]
