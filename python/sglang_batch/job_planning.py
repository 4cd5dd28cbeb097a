"""A job's plans: the first one, and better ones as its answers come.

The prompts are read once, for the prefix tree. A plan made again has the same tree, and
other estimates of the output lengths; so it needs no prompts, and takes tens of
milliseconds for a hundred thousand requests. Where the engine has several replicas, the
job is cut into a shard for each, and every shard is planned by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .config import OfflineBatchConfig
from .planner.candidates import best
from .planner.density import leaf_work
from .planner.order import (
    ORDERS,
    Order,
    OrderSettings,
    families_mixed,
    make_order,
)
from .planner.output_length import (
    OutputEstimates,
    OutputLengthEstimator,
    choose_sample,
)
from .planner.partition import partition
from .planner.plan import AUTO, Machine, Plan
from .planner.prefix_tree import build_prefix_tree
from .planner.requests import UNKNOWN, Int32s, Int64s, PlanRequests
from .planner.shard import ShardJob, shard_job
from .planner.simulator import Simulation, simulate
from .scheduling.job_plan import JobPlan, job_plan

# Orders that depend on the estimates: a sample of the answers goes before them.
ESTIMATING = (AUTO, "dual-scan", "prefix-groups", "lpt")
# Below so many requests of unknown length a sample would be most of the job.
MIN_SAMPLED = 64
# What ``auto`` goes by until the sample was answered.
_UNTIL_SAMPLED = "dfs"


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What one replica is to run.

    plan: its requests go by their places in ``numbers``.
    numbers: int64, the number of each request in the job.
    """

    plan: Plan
    numbers: Int64s

    @property
    def both_ends(self) -> bool:
        """Whether the order is taken from both ends."""
        return self.plan.scan.density is not None

    @property
    def sides(self) -> tuple[Int64s, Int64s]:
        """Numbers of the left and of the right side, each in the order of sending.

        An order that is followed is all on the left.
        """
        scan = self.plan.scan
        order = self.numbers[scan.requests]
        num_left = scan.num_left if self.both_ends else len(order)
        return order[:num_left], order[num_left:][::-1]

    @property
    def too_large(self) -> Int64s:
        """Numbers of the requests that need more KV than there is."""
        return self.numbers[self.plan.too_large]

    def for_scheduler(self, machine: Machine) -> JobPlan:
        return job_plan(self.plan, self.numbers, machine)


class JobPlanner:
    """Plans a job as often as it is asked to. One call at a time, from any thread.

    Args:
        requests: the job's; their prompts are not needed once this returns.
        numbers: int64 ``[n]``, the number of each request in the job.
        num_shards: replicas of the engine.

    Attributes:
        tree: of the requests that fit.
        sample: int64, numbers of the requests whose answers the order waits for; they
            are first in the first plan. Empty where no order depends on answers.
        num_unknown: requests of unknown output length.
    """

    def __init__(
        self,
        requests: PlanRequests,
        numbers: Int64s,
        machine: Machine,
        config: OfflineBatchConfig,
        num_shards: int = 1,
    ) -> None:
        self._machine = machine
        self._settings = OrderSettings(seed=config.seed)
        self._policy = config.policy
        # SGLang's own scheduler takes requests as they come, from no two ends.
        self._followed = config.scheduler == "stock"
        known = np.maximum(requests.known_output_len, 1).astype(np.int64)
        fits = requests.input_len + known <= machine.limits.kv_capacity_tokens
        kept = requests if fits.all() else requests.take(np.flatnonzero(fits))
        self.tree = build_prefix_tree(kept.tokens, kept.offsets)
        self._requests = kept = _without_prompts(kept)
        self._numbers, self._too_large = numbers[fits], numbers[~fits]
        self._place = np.full(int(numbers.max(initial=-1)) + 1, -1, np.int64)
        self._place[self._numbers] = np.arange(len(kept))
        self._estimator = OutputLengthEstimator(self.tree, kept)
        self.num_unknown = int((kept.known_output_len == UNKNOWN).sum())
        self._sample = np.zeros(0, np.int64)
        if config.policy in ESTIMATING and self.num_unknown >= MIN_SAMPLED:
            self._sample = choose_sample(self.tree, kept, seed=config.seed)
        self.sample = self._numbers[self._sample]
        self._shards = self._cut(num_shards)

    @property
    def num_requests(self) -> int:
        return len(self._numbers) + len(self._too_large)

    def observe(self, numbers: Int64s, output_len: Int32s) -> None:
        """Learn from answers: the output lengths, in tokens, of these requests.

        Answers that are longer than a request allows have several sequences, and those
        of too large requests do not matter: nothing is learnt from them. The sample
        has gone first from now on.
        """
        place = self._place[numbers]
        most = np.where(place < 0, -1, self._requests.max_new_tokens[place])
        learnt = output_len <= most
        self._estimator.observe(place[learnt], output_len[learnt])
        self._sample = self._sample[:0]

    def plans(self) -> list[ShardPlan]:
        """A plan for each replica, by the answers that are known."""
        estimates = self._estimator.estimates()
        policy = self._policy
        if policy == AUTO and len(self._sample):
            policy = _UNTIL_SAMPLED
        elif policy == AUTO:
            policy = self._policy = self._choose(estimates)
        return [
            self._plan(
                shard, policy, estimates, self._too_large[i :: len(self._shards)]
            )
            for i, shard in enumerate(self._shards)
        ]

    def _cut(self, num_shards: int) -> list[ShardJob]:
        everything = np.arange(len(self._requests))
        if num_shards == 1:
            return [ShardJob(everything, self.tree, self._requests)]
        estimates = self._estimator.estimates()
        cost = self._machine.cost
        work = leaf_work(
            self.tree, cost, estimates.est_output_len, estimates.est_output_len_sq
        )
        cut = partition(self.tree, cost, work, num_shards)
        return [
            shard_job(self.tree, self._requests, cut, shard)
            for shard in range(num_shards)
        ]

    def _plan(
        self,
        shard: ShardJob,
        policy: str,
        estimates: OutputEstimates,
        too_large: Int64s,
    ) -> ShardPlan:
        n = len(shard.index)
        own = _of_shard(estimates, shard)
        first = np.flatnonzero(np.isin(shard.index, self._sample))
        if policy == "dual-scan" and self._knows_nothing:
            scan = families_mixed(shard.tree, self._settings.seed)
        else:
            scan = self._order(shard, policy, own)
        if scan.density is not None and self._followed:
            scan = Order(self._simulate(shard, scan, own).admission_order)
        if len(first):
            # In depth-first order, as the sample is.
            position = np.empty(n, np.int64)
            position[shard.tree.order] = np.arange(n)
            scan = scan.beginning_with(first[np.argsort(position[first])])
        behind = np.arange(n, n + len(too_large))
        plan = Plan(
            policy=policy,
            order=np.concatenate([scan.requests, behind]),
            too_large=behind,
            scan=scan,
            estimates=own,
            tree=shard.tree,
            fits=np.arange(n),
            output_len=np.zeros(0, np.int32),
        )
        return ShardPlan(plan, np.concatenate([self._numbers[shard.index], too_large]))

    @property
    def _knows_nothing(self) -> bool:
        """Whether the sides of a dual scan would be guesswork."""
        most = 2 * self.num_unknown > len(self._requests)
        return most and len(self._sample) > 0

    def _order(self, shard: ShardJob, policy: str, own: OutputEstimates) -> Order:
        return make_order(
            policy,
            shard.tree,
            shard.requests,
            self._machine.cost,
            own.est_output_len,
            own.est_output_len_sq,
            self._settings,
        )

    def _choose(self, estimates: OutputEstimates) -> str:
        """The fastest order by simulation of a shard; shards are alike."""
        shard = max(self._shards, key=lambda shard: len(shard.index))
        own = _of_shard(estimates, shard)
        return best(
            {
                policy: self._simulate(shard, self._order(shard, policy, own), own)
                for policy in ORDERS
            }
        )

    def _simulate(
        self, shard: ShardJob, order: Order, own: OutputEstimates
    ) -> Simulation:
        capacity = self._machine.limits.kv_capacity_tokens
        drawn = self._estimator.draw(self._settings.seed)[shard.index]
        input_len = np.empty(len(drawn), np.int64)
        input_len[shard.tree.order] = shard.tree.input_len
        output_len = np.maximum(np.minimum(drawn, capacity - input_len), 1)
        return simulate(
            shard.tree,
            self._machine.cost,
            self._machine.limits,
            order=order.requests,
            output_len=output_len.astype(np.int32),
            estimate=own.est_output_len,
            estimate_sq=own.est_output_len_sq,
            max_new_tokens=shard.requests.max_new_tokens,
            density=order.density,
            num_left=order.num_left,
        )


def _of_shard(estimates: OutputEstimates, shard: ShardJob) -> OutputEstimates:
    return OutputEstimates(
        estimates.est_output_len[shard.index], estimates.est_output_len_sq[shard.index]
    )


def _without_prompts(requests: PlanRequests) -> PlanRequests:
    """What is left to know of requests whose prefix tree is made."""
    return PlanRequests(
        tokens=np.zeros(0, np.int32),
        offsets=np.zeros(len(requests) + 1, np.int64),
        max_new_tokens=requests.max_new_tokens,
        known_output_len=requests.known_output_len,
    )
