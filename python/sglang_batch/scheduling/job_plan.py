"""What the scheduler has to know of a job: the plan, as arrays that travel.

Made beside the planner, sent once to every scheduler process when a job opens, and
again when its estimates or its order change. A request finds its part of the plan by
the number at the end of its request id.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace

import numpy as np

from ..planner.cost_model import CostModel
from ..planner.density import read_len
from ..planner.output_length import OutputEstimates
from ..planner.plan import Machine, Plan
from ..planner.requests import Floats, Int32s, Int64s
from ..planner.simulator import planned_work


@dataclass(frozen=True, slots=True)
class StepCost:
    """Times that a step is made of, in seconds; see ``planner.cost_model.CostModel``."""

    token_time_s: float
    attention_time_s: float
    kv_read_time_s: float
    weight_read_time_s: float

    @classmethod
    def of(cls, cost: CostModel) -> StepCost:
        return cls(
            float(cost.token_time_s),
            float(cost.attention_time_s),
            float(cost.kv_read_time_s),
            float(cost.weight_read_time_s),
        )


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job, or one replica's shard of it; ``n`` planned requests, ``m`` tree nodes.

    policy: the order's name.
    leaf: int32 by number of the request in the job; its leaf, -1 for not planned here.
    turn, node, input_len: int32 ``[n]`` by leaf: place in the order, node that the
        prompt hangs from, prompt tokens.
    read_len: int32 ``[n]`` by leaf: prompt tokens that a decode step reads; its part of
        them where attention reads a shared prefix once.
    steps, steps_sq: float64 ``[n]`` by leaf: moments of its decode steps.
    parent, depth: int32 ``[m]`` by node. leaf_begin, leaf_end: the leaves below.
    density: float64 ``[n]`` by turn for an order that is taken from both ends;
        None for one that is followed.
    num_left: turns on the left side.
    compute_s, kv_read_s: of the whole job, by the estimates.
    min_step_tokens: see ``planner.sim_state.Engine``.
    """

    policy: str
    leaf: Int32s
    turn: Int32s
    node: Int32s
    input_len: Int32s
    read_len: Int32s
    steps: Floats
    steps_sq: Floats
    parent: Int32s
    depth: Int32s
    leaf_begin: Int64s
    leaf_end: Int64s
    density: Floats | None
    num_left: int
    compute_s: float
    kv_read_s: float
    min_step_tokens: int
    cost: StepCost

    @property
    def num_requests(self) -> int:
        return len(self.turn)

    def same_requests(self, other: JobPlan) -> bool:
        """Whether two plans are of the same requests; only then is it one job."""
        names = ("leaf", "node", "input_len", "parent", "depth")
        return all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in names
        )

    def without_prefixes(self) -> JobPlan:
        """The same where nothing is shared: nobody waits for another's prefix."""
        return replace(
            self,
            node=np.zeros_like(self.node),
            read_len=self.input_len,
            parent=self.parent[:1],
            depth=self.depth[:1],
            leaf_begin=self.leaf_begin[:1],
            leaf_end=self.leaf_end[:1],
        )

    def to_bytes(self) -> bytes:
        return pickle.dumps(self, protocol=pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def from_bytes(data: bytes) -> JobPlan:
        plan = pickle.loads(data)
        assert isinstance(plan, JobPlan)
        return plan


def job_plan(plan: Plan, numbers: Int64s, machine: Machine) -> JobPlan:
    """The part of a plan that the scheduler carries out.

    Args:
        numbers: int64, the number in the job of each request that was planned.
    """
    tree, estimates, cost = plan.tree, plan.estimates, machine.cost
    numbered = numbers[plan.fits]
    n = tree.num_requests
    leaf_of_place = np.empty(n, np.int32)
    leaf_of_place[tree.order] = np.arange(n, dtype=np.int32)
    leaf = np.full(int(numbers.max(initial=-1)) + 1, -1, np.int32)
    leaf[numbered] = leaf_of_place
    place_of = np.empty(int(plan.fits.max(initial=-1)) + 1, np.int64)
    place_of[plan.fits] = np.arange(n)
    turn = np.empty(n, np.int32)
    turn[leaf_of_place[place_of[plan.scan.requests]]] = np.arange(n, dtype=np.int32)
    steps, steps_sq = _decode_steps(estimates)
    compute_s, kv_read_s = planned_work(tree, cost, steps, steps_sq)
    return JobPlan(
        policy=plan.policy,
        leaf=leaf,
        turn=turn,
        node=tree.leaf_parent.astype(np.int32),
        input_len=tree.input_len.astype(np.int32),
        read_len=np.rint(read_len(tree, cost)).astype(np.int32),
        steps=steps[tree.order],
        steps_sq=steps_sq[tree.order],
        parent=tree.parent,
        depth=tree.depth,
        leaf_begin=tree.leaf_begin,
        leaf_end=tree.leaf_end,
        density=plan.scan.density,
        num_left=plan.scan.num_left,
        compute_s=compute_s,
        kv_read_s=kv_read_s,
        min_step_tokens=_min_step_tokens(machine),
        cost=StepCost.of(cost),
    )


def unplanned(machine: Machine) -> JobPlan:
    """Of a job whose requests are taken as they come."""
    none = np.zeros(0, np.int32)
    root = np.zeros(1, np.int32)
    return JobPlan(
        policy="fcfs",
        leaf=none,
        turn=none,
        node=none,
        input_len=none,
        read_len=none,
        steps=np.zeros(0),
        steps_sq=np.zeros(0),
        parent=root - 1,
        depth=root,
        leaf_begin=root.astype(np.int64),
        leaf_end=root.astype(np.int64),
        density=None,
        num_left=0,
        compute_s=0.0,
        kv_read_s=0.0,
        min_step_tokens=_min_step_tokens(machine),
        cost=StepCost.of(machine.cost),
    )


def _decode_steps(estimates: OutputEstimates) -> tuple[Floats, Floats]:
    """Moments of the decode steps by request: the first token comes with the prompt."""
    length, length_sq = estimates.est_output_len, estimates.est_output_len_sq
    steps = np.maximum(length - 1.0, 0.0)
    return steps, np.maximum(length_sq - 2.0 * length + 1.0, steps**2)


def _min_step_tokens(machine: Machine) -> int:
    return min(machine.limits.min_step_tokens, machine.limits.step_tokens)
