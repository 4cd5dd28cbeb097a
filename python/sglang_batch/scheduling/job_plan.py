"""The part of a job's plan that the scheduler needs, as arrays that can be sent.

It is sent to every scheduler process when a job opens, and again when estimates or the
order change, or when the plan grows. The number at the end of a request's id is its number
in the job. It never changes, while a request's leaf may be another one in each plan that
covers other requests.
"""

from __future__ import annotations

import pickle
import zlib
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..planner.costs.cost_model import CostModel, MixingCost
from ..planner.costs.tree_work import decode_step_moments, planned_work, read_len
from ..planner.machine_model import Machine
from ..planner.plan import Plan
from ..planner.requests import Int32s, Int64s

Float32s = NDArray[np.float32]

# No job has as many steps, and what plans are sent as has integers of 64 bits.
_MOST_STEPS = 1 << 62


# How long a step with drafts may take. Those that save a quarter of the steps are worth that.
LIGHT = 4 / 3


@dataclass(frozen=True, slots=True)
class StepCost:
    """The times that add up to a step, in seconds; see ``planner.costs.cost_model``.

    mixing: when prompts and decodes have steps of their own. None: never.
    interference_exponent: k of the overlap, of whole steps or of two forwards at once.
    light_tokens: most tokens of a step that takes at most ``LIGHT`` times as long as a step of one.
    """

    token_time_s: float
    attention_time_s: float
    kv_read_time_s: float
    weight_read_time_s: float
    row_share: float = 0.0
    padded: bool = False
    encoder_token_time_s: float = 0.0
    mixing: MixingCost | None = None
    interference_exponent: float = 1.0
    light_tokens: int = 0

    @classmethod
    def of(cls, cost: CostModel) -> StepCost:
        return cls(
            float(cost.token_time_s),
            float(cost.attention_time_s),
            float(cost.kv_read_time_s),
            float(cost.weight_read_time_s),
            float(cost.row_share),
            cost.padded,
            float(cost.encoder_token_time_s),
            MixingCost.of(cost),
            float(max(cost.interference_exponent, cost.split_exponent)),
            cost.light_tokens(LIGHT),
        )


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job, or one replica's shard of it; ``n`` planned requests, ``m`` tree nodes.

    policy: the order's name.
    number: int32 ``[n]`` by leaf: the request's number in the job.
    position, node, input_len: int32 ``[n]`` by leaf: position in the order, the node
        above the leaf, prompt tokens.
    read_len: int32 ``[n]`` by leaf: prompt tokens that a decode step reads. Where
        attention reads a shared prefix once, the request's share of them.
    est_decode_steps, est_decode_steps_sq: float32 ``[n]`` by leaf: expectation of the
        decode steps and of their square. One less than the output tokens, since the
        first token comes from the prefill.
    parent, depth: int32 ``[m]`` by node: the node above, and tokens from the root.
    leaf_begin, leaf_end: int32 ``[m]`` by node: the range of the leaves below.
    density: float32 ``[n]`` by position, for an order that is taken from both ends.
        None for an order that is followed.
    num_left: number of positions on the left side.
    compute_s, kv_read_s: seconds of the whole job, by the estimates.
    min_step_tokens: see ``planner.machine_model.EngineLimits``.
    length_rule: of ``planner.kv_lengths.batch_state``, if requests join in batches of
        similar KV length. 0 for an order that is followed.
    length_key, family: int32 ``[n]`` by leaf, the length by which a request joins, and the
        family with which. None without a rule.
    max_wait_steps: decode steps after which a waiting request joins before all others, with
        a rule. None for the engine's default.
    open_ended: whether requests that nobody knows of yet may share its prefixes.
    """

    policy: str
    number: Int32s
    position: Int32s
    node: Int32s
    input_len: Int32s
    read_len: Int32s
    est_decode_steps: Float32s
    est_decode_steps_sq: Float32s
    parent: Int32s
    depth: Int32s
    leaf_begin: Int32s
    leaf_end: Int32s
    density: Float32s | None
    num_left: int
    compute_s: float
    kv_read_s: float
    min_step_tokens: int
    cost: StepCost
    open_ended: bool = False
    length_rule: int = 0
    length_key: Int32s | None = None
    family: Int32s | None = None
    max_wait_steps: int | None = None

    @property
    def num_requests(self) -> int:
        return len(self.position)

    def same_requests(self, other: JobPlan) -> bool:
        """Whether two plans have the same requests, and so the same tree."""
        names = ("number", "node", "input_len", "parent", "depth")
        return all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in names
        )

    def without_prefixes(self) -> JobPlan:
        """The plan without shared prefixes, so that no request waits for another's."""
        return replace(
            self,
            node=np.zeros_like(self.node),
            read_len=self.input_len,
            parent=self.parent[:1],
            depth=self.depth[:1],
            leaf_begin=self.leaf_begin[:1],
            leaf_end=self.leaf_end[:1],
        )

    def with_shorter_prefixes(self, tokens: int) -> JobPlan:
        """The plan for a cache that does not share the last ``tokens`` of a prefix."""
        return replace(self, depth=np.maximum(self.depth - tokens, 0))

    def from_one_end(self) -> JobPlan:
        """The plan with an order that is followed, from first to last."""
        return self if self.density is None else replace(self, density=None)

    def to_bytes(self) -> bytes:
        return _to_bytes(self)

    @staticmethod
    def from_bytes(data: bytes) -> JobPlan:
        plan = pickle.loads(zlib.decompress(data))
        assert isinstance(plan, JobPlan)
        return plan

    def changes_from(self, last: JobPlan) -> bytes:
        """The difference from a plan of the same requests, for :meth:`changed`."""
        changes: dict[str, object] = {}
        for field in fields(self):
            old, new = getattr(last, field.name), getattr(self, field.name)
            if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
                at = np.flatnonzero(old != new).astype(np.int32)
                # Index and value take as much as two values.
                if len(at) and 2 * len(at) < len(new):
                    changes[field.name] = _Some(at, new[at])
                elif len(at):
                    changes[field.name] = new
            elif old is not new and (old is None or new is None or old != new):
                changes[field.name] = new
        return _to_bytes(changes)

    def changed(self, changes: bytes) -> JobPlan:
        values = pickle.loads(zlib.decompress(changes))
        for name, value in values.items():
            if isinstance(value, _Some):
                values[name] = getattr(self, name).copy()
                values[name][value.at] = value.values
        return replace(self, **values)


class _Some(NamedTuple):
    """Values of an array at some places, int32."""

    at: Int32s
    values: NDArray[Any]


def _to_bytes(value: object) -> bytes:
    """Pickled, and compressed: neighbours in the tree have similar values."""
    return zlib.compress(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), 1)


def job_plan(plan: Plan, numbers: Int64s, machine: Machine) -> JobPlan:
    """The part of a plan that the scheduler carries out.

    Args:
        numbers: int64, the number in the job of each planned request.
    """
    tree, estimates, cost = plan.tree, plan.estimates, machine.cost
    density = plan.scan.density
    number = numbers[tree.order].astype(np.int32)
    n = tree.num_requests
    position = np.empty(n, np.int32)
    position[tree.position[plan.scan.requests]] = np.arange(n, dtype=np.int32)
    lengths = plan.scan.lengths
    key = family = max_wait_steps = None
    if lengths is not None:
        key, family = lengths.key[tree.order], lengths.family[tree.order]
        if lengths.max_wait_steps is not None:
            max_wait_steps = min(lengths.max_wait_steps, _MOST_STEPS)
    length, length_sq = estimates.est_output_len, estimates.est_output_len_sq
    steps, est_decode_steps_sq = decode_step_moments(length, length_sq)
    compute_s, kv_read_s = planned_work(tree, cost, steps, est_decode_steps_sq)
    return JobPlan(
        policy=plan.policy,
        number=number,
        position=position,
        node=tree.leaf_parent.astype(np.int32),
        input_len=tree.input_len.astype(np.int32),
        read_len=np.rint(read_len(tree, cost)).astype(np.int32),
        est_decode_steps=steps[tree.order].astype(np.float32),
        est_decode_steps_sq=est_decode_steps_sq[tree.order].astype(np.float32),
        parent=tree.parent,
        depth=tree.depth,
        leaf_begin=tree.leaf_begin.astype(np.int32),
        leaf_end=tree.leaf_end.astype(np.int32),
        density=None if density is None else density.astype(np.float32),
        num_left=plan.scan.num_left,
        compute_s=compute_s,
        kv_read_s=kv_read_s,
        min_step_tokens=_min_step_tokens(machine),
        cost=StepCost.of(cost),
        length_rule=0 if lengths is None else lengths.rule,
        length_key=key,
        family=family,
        max_wait_steps=max_wait_steps,
    )


def unplanned(machine: Machine) -> JobPlan:
    """The plan of a job whose requests join in the order of their arrival."""
    none = np.zeros(0, np.int32)
    root = np.zeros(1, np.int32)
    return JobPlan(
        policy="fcfs",
        number=none,
        position=none,
        node=none,
        input_len=none,
        read_len=none,
        est_decode_steps=np.zeros(0, np.float32),
        est_decode_steps_sq=np.zeros(0, np.float32),
        parent=root - 1,
        depth=root,
        leaf_begin=root,
        leaf_end=root,
        density=None,
        num_left=0,
        compute_s=0.0,
        kv_read_s=0.0,
        min_step_tokens=_min_step_tokens(machine),
        cost=StepCost.of(machine.cost),
    )


def _min_step_tokens(machine: Machine) -> int:
    return min(machine.limits.min_step_tokens, machine.limits.step_tokens)


class LeafNumbers:
    """The leaf of each request of one plan.

    The numbers of an open-ended job grow without end, while its plan has only the latest,
    so the table begins at the ``lowest`` number of the plan, 0 if there is none.

    Args:
        number: int32 ``[n]`` by leaf, the numbers of the requests in the job.
    """

    def __init__(self, number: Int32s) -> None:
        self.lowest = int(number.min()) if len(number) else 0
        most = int(number.max()) if len(number) else -1
        self._leaf = np.full(most - self.lowest + 1, -1, np.int32)
        self._leaf[number - self.lowest] = np.arange(len(number), dtype=np.int32)

    def of(self, number: int) -> int:
        """The leaf of a request, -1 if it is not planned."""
        place = number - self.lowest
        return int(self._leaf[place]) if 0 <= place < len(self._leaf) else -1

    def of_all(self, number: Int32s) -> Int32s:
        """The leaf of each request, int32, -1 for those that are not planned."""
        place = number - self.lowest
        inside = (place >= 0) & (place < len(self._leaf))
        leaf = np.full(len(number), -1, np.int32)
        leaf[inside] = self._leaf[place[inside]]
        return leaf
