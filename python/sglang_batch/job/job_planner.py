"""A job's plans: the first one, and better ones as answers come.

The prompts are read once, for the prefix tree. A later plan has the same tree and other
estimates of the output lengths, and takes tens of milliseconds for a hundred thousand
requests. If the engine has several replicas, each has a shard with a plan of its own. Later
plans move requests that have not been sent between the shards, so that all of them end
together, also where replicas differ in speed, leave or join.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..config import AUTO, POLICY_TABLE, OfflineBatchConfig
from ..planner.costs.cost_model import CostModel
from ..planner.costs.hardware import hardware
from ..planner.costs.model_spec import TYPICAL_MODEL
from ..planner.machine_model import EngineLimits, Machine
from ..planner.ordering.order import Order, OrderSettings, by_adapter, families_mixed
from ..planner.ordering.order_functions import make_order
from ..planner.output_lengths.estimates import OutputEstimates, OutputLengthEstimator
from ..planner.output_lengths.sample import choose_sample
from ..planner.plan import GUESSED_SCALES, Plan, choose, orders_for
from ..planner.prefixes.prefix_tree import build_prefix_tree
from ..planner.requests import UNKNOWN, Bools, Int32s, Int64s, PlanRequests
from ..planner.sharding.partition import ShardJob
from ..planner.sharding.speeds import ShardSpeeds
from ..planner.simulator.simulator import Simulation, simulate
from .job_shards import JobProgress, JobShards, ShardPlan

# With fewer requests of unknown length, a sample would be most of the job.
MIN_SAMPLED = 64
# ``auto`` simulates a job with so many draws of its output lengths at most, and with fewer if those
# of a larger job have more requests than this in all. A job that is larger by itself keeps the
# order that it chose.
_MOST_DRAWS = 10
_MOST_DRAWN = 16_384


class JobPlanner:
    """Plans a job any number of times. One call at a time, from any thread.

    Args:
        requests: the job's requests. Their prompts are only read by this call.
        numbers: int64 ``[n]``, the number of each request in the job.
        num_shards: replicas of the engine.
        progress: of the requests that a plan had before.
        speeds: of the replicas. None: all are as fast, as if none is there.

    Attributes:
        tree: the prefix tree of the requests that fit into the KV cache.
        sample: int64, numbers of the requests that the first plan begins with, so that
            their answers improve the next one. Empty if the policy needs no estimates, or
            if all samples would compute too many prefixes again.
        num_unknown: requests of unknown output length.
        policy: of the last plan.

    Raises:
        ConfigError: the speeds are not those of ``num_shards`` replicas, or a request has a
            replica that is none of them.
    """

    def __init__(
        self,
        requests: PlanRequests,
        numbers: Int64s,
        machine: Machine,
        config: OfflineBatchConfig,
        num_shards: int = 1,
        progress: JobProgress | None = None,
        speeds: ShardSpeeds | None = None,
    ) -> None:
        self._machine = machine
        self._settings = OrderSettings(
            seed=config.seed, max_wait_steps=config.max_wait_steps
        )
        self._policy = self.policy = policy = config.policy
        # SGLang's own scheduler runs requests in the order of arrival, and with prompts
        # computed elsewhere there are none to blend: neither takes them from both ends.
        self._from_one_end = config.scheduler == "stock" or bool(config.prefill_servers)
        known = np.maximum(requests.known_output_len, 1).astype(np.int64)
        fits = requests.input_len + known <= machine.limits.kv_capacity_tokens
        kept = requests if fits.all() else requests.take(np.flatnonzero(fits))
        self.tree = build_prefix_tree(
            kept.tokens, kept.offsets, count_media=machine.cost.encoder_token_time_s > 0
        )
        # Without their tokens, to free the memory.
        offsets = np.zeros(len(kept) + 1, np.int64)
        kept = replace(kept, tokens=np.zeros(0, np.int32), offsets=offsets)
        self._requests = kept
        self._numbers, self._too_large = numbers[fits], numbers[~fits]
        self._place = np.full(int(numbers.max(initial=-1)) + 1, -1, np.int64)
        self._place[self._numbers] = np.arange(len(kept))
        self._estimator = OutputLengthEstimator(self.tree, kept)
        self.num_unknown = int((kept.known_output_len == UNKNOWN).sum())
        self._sample = np.zeros(0, np.int64)
        needs_estimates = POLICY_TABLE[policy].needs_estimates
        # Without a sample, the first answers of a simple order are waited for.
        self._is_sampling = (
            needs_estimates and int(kept.without_estimate.sum()) >= MIN_SAMPLED
        )
        if self._is_sampling:
            self._sample = choose_sample(self.tree, kept, seed=config.seed)
        self._drawn: Int32s | None = None
        self._has_answers = False
        self._rechooses = len(kept) <= _MOST_DRAWN and not machine.limits.dense
        self._chosen: str | None = None  # by ``auto``, from all that is observed
        self._present: str | None = None  # that the requests which run were sent by
        self._begun = np.zeros(len(kept), np.bool_)
        self._rank = self.tree.position.copy()  # by the last plan
        self.sample = self._numbers[self._sample]
        self._shards = JobShards(
            self.tree,
            kept,
            machine,
            num_shards,
            self._estimator.estimates(),
            None if progress is None else progress.replica[self._numbers],
            speeds,
        )

    @property
    def num_requests(self) -> int:
        return len(self._numbers) + len(self._too_large)

    def observe(self, numbers: Int64s, output_len: Int32s) -> None:
        """Improve the estimates with the output lengths of answered requests. Later plans
        no longer begin with the sample.

        Args:
            numbers: int64 ``[k]``, the numbers of the requests in the job.
            output_len: int32 ``[k]``, in tokens. Of a request that still runs, the
                tokens that it has so far, negated. Lengths above ``max_new_tokens`` are those of
                several sequences, and are ignored.
        """
        place = self._place[numbers]
        fits = place >= 0
        place, output_len = place[fits], output_len[fits]
        usable = np.abs(output_len) <= self._requests.max_new_tokens[place]
        ended, running = usable & (output_len >= 0), usable & (output_len < 0)
        self._estimator.observe(place[ended], output_len[ended])
        self._estimator.observe_running(place[running], -output_len[running])
        self._sample = self._sample[:0]
        self._is_sampling = False
        self._has_answers |= bool(ended.any())
        if self._rechooses:
            self._chosen = None

    def observed_before(
        self, answers: Sequence[tuple[Int64s, Int32s]], sent: Bools
    ) -> None:
        """Take over from the planner of fewer requests, before the first plan. The sample
        has only unsent requests then, which come first although the estimates are good
        enough without it.

        Args:
            answers: all that were observed, in the order of :meth:`observe`.
            sent: bool by number, the requests that were sent.
        """
        sample, self._sample = self._sample, self._sample[:0]
        for numbers, output_len in answers:
            self.observe(numbers, output_len)
        self._sample = sample[~sent[self._numbers[sample]]]
        self.sample = self._numbers[self._sample]

    def plans(
        self, progress: JobProgress | None = None, speeds: ShardSpeeds | None = None
    ) -> list[ShardPlan]:
        """A plan for each replica, from the answers observed so far.

        Args:
            progress: where the requests are now. None if all may move. speeds: of the
            replicas now, those that joined since the last plan last, 0 for those that
                left. None: as in the last plan.

        Raises:
            ConfigError: there are speeds of fewer replicas than in the last plan.
        """
        estimates = self._estimator.estimates()
        self._drawn = None
        if progress is not None or speeds is not None:
            if progress is not None:
                progress = progress.take(self._numbers)
                if self._rechooses:
                    self._begun = progress.left < 1.0
            self._shards.rebalance(estimates, progress, speeds)
        policy = self._policy
        if policy == AUTO and self._is_sampling:  # the simplest until there are answers
            orders = orders_for(self._machine)
            policy = next(x for x in orders if not POLICY_TABLE[x].by_length)
        elif policy == AUTO:
            if self._chosen is None:
                self._chosen = self._present = self._choose(estimates)
            policy = self._chosen
        self.policy = policy
        is_there = self._shards.speeds.there
        there = np.flatnonzero(is_there | ~is_there.any())
        # Requests that fit nowhere are answered by the replicas that are there.
        dealt = [self._too_large[:0]] * len(is_there)
        for i, replica in enumerate(there):
            dealt[replica] = self._too_large[i :: len(there)]
        plans = [
            self._plan(shard, policy, estimates, too_large)
            for shard, too_large in zip(self._shards.each, dealt, strict=True)
        ]
        for plan in plans:
            for side in plan.sides:
                self._shards.ordered(self._place[side])
        return plans

    def _plan(
        self,
        shard: ShardJob,
        policy: str,
        estimates: OutputEstimates,
        too_large: Int64s,
    ) -> ShardPlan:
        own = estimates.take(shard.index)
        # Too few output lengths may be known to tell left from right.
        unknown = self._is_sampling and 2 * self.num_unknown > len(self._requests)
        if unknown and POLICY_TABLE[policy].both_ends:
            order = families_mixed(shard.tree, self._settings.seed)
        else:
            order = self._order(shard, policy, own)
        if order.is_dynamic and self._from_one_end:
            if self._drawn is None:  # for all shards of a plan
                self._drawn = self._estimator.draw(self._settings.seed)
            run = self._simulate(shard, order, own, self._drawn)
            order = Order(run.admission_order)
        first = np.flatnonzero(np.isin(shard.index, self._sample))
        if len(first):
            # The sample is depth-first.
            by_leaf = np.argsort(shard.tree.position[first])
            order = order.beginning_with(first[by_leaf])
        order = by_adapter(order, shard.requests.adapter)
        self._rank[shard.index[order.requests]] = np.arange(len(order.requests))
        plan = Plan(policy, order, own, shard.tree)
        return ShardPlan(plan, self._numbers[shard.index], too_large)

    def _order(self, shard: ShardJob, policy: str, own: OutputEstimates) -> Order:
        return make_order(
            policy,
            shard.tree,
            shard.requests,
            self._machine.cost,
            own,
            self._settings,
            self._machine.limits.kv_capacity_tokens,
        )

    def _choose(self, estimates: OutputEstimates) -> str:
        """The policy that is fastest in simulations of the largest shard, after the requests
        that have begun."""
        shard = max(self._shards.each, key=lambda shard: len(shard.index))
        own = estimates.take(shard.index)
        begun = np.flatnonzero(self._begun[shard.index])
        begun = begun[np.argsort(self._rank[shard.index[begun]], kind="stable")]
        orders = {
            policy: self._order(shard, policy, own)
            for policy in orders_for(self._machine)
        }
        if len(begun):
            drawn = self._estimator.draw(self._settings.seed)
            for policy, order in orders.items():
                order = order.beginning_with(begun)
                if order.is_dynamic:
                    # The simulator takes it from its ends from the first step on.
                    run = self._simulate(shard, order, own, drawn)
                    order = Order(run.admission_order).beginning_with(begun)
                orders[policy] = order
        return choose(
            orders,
            self._draws(),
            lambda order, drawn: self._simulate(shard, order, own, drawn),
            self._present,
        )

    def _draws(self) -> Iterator[Int32s]:
        """Output lengths of all requests, int32 ``[n]`` each. Where most are guesses, some draws are
        all shorter or longer."""
        number = 1
        if self.num_unknown:
            number = min(_MOST_DRAWS, max(1, _MOST_DRAWN // len(self._requests)))
        guessed = 10 * self.num_unknown >= len(self._requests)
        scales = GUESSED_SCALES if guessed and not self._has_answers else (1.0,)
        for i in range(number):
            scale = scales[i % len(scales)]
            yield self._estimator.draw(self._settings.seed + i, scale)

    def _simulate(
        self, shard: ShardJob, order: Order, own: OutputEstimates, drawn: Int32s
    ) -> Simulation:
        """A run with output lengths ``drawn``, int32 by request of the job."""
        capacity = self._machine.limits.kv_capacity_tokens
        drawn = drawn[shard.index]
        input_len = np.empty(len(drawn), np.int64)
        input_len[shard.tree.order] = shard.tree.input_len
        output_len = np.maximum(np.minimum(drawn, capacity - input_len), 1)
        return simulate(
            shard.tree,
            self._machine.cost,
            self._machine.limits,
            order=order,
            output_len=output_len.astype(np.int32),
            est_output_len=own.est_output_len,
            est_output_len_sq=own.est_output_len_sq,
            max_new_tokens=shard.requests.max_new_tokens,
        )


logger = logging.getLogger(__name__)

# Loading compiled code takes less than this, in seconds.
_LOADING_S = 5.0


def compile_planner(config: OfflineBatchConfig, *, dense: bool = False) -> None:
    """Make all plans of a tiny job: the first, one from answers, and for two engines.

    Args:
        dense: plan for the engine on transformers.
    """
    if not POLICY_TABLE[config.policy].uses_prompts:
        return
    said = threading.Timer(
        _LOADING_S,
        logger.info,
        ["Compiling the planner, once per installation; the first plan waits for it"],
    )
    said.daemon = True
    said.start()
    try:
        _plan(config, dense)
    finally:
        said.cancel()


def _plan(config: OfflineBatchConfig, dense: bool) -> None:
    num_requests, prompt_len = 2 * MIN_SAMPLED, 8
    # Two families of requests that share half of their prompts.
    prompts = np.arange(num_requests * prompt_len, dtype=np.int32).reshape(
        num_requests, prompt_len
    )
    prompts[::2, :4], prompts[1::2, :4] = 1, 2
    requests = PlanRequests(
        tokens=prompts.ravel(),
        offsets=np.arange(num_requests + 1, dtype=np.int64) * prompt_len,
        max_new_tokens=np.full(num_requests, 16, np.int32),
        known_output_len=np.full(num_requests, UNKNOWN, np.int32),
    )
    cost = CostModel.of(TYPICAL_MODEL, hardware("h100"), attention_flops=True)
    limits = EngineLimits(4096, as_sglang=not dense, dense=dense)
    machine = Machine(replace(cost, padded=dense), limits)
    numbers = np.arange(num_requests)
    planner = JobPlanner(requests, numbers, machine, config)
    for shard in planner.plans():
        shard.for_scheduler(machine)
    lengths = np.full(num_requests, 4, np.int32)
    lengths[0] = -2  # it still runs
    planner.observe(numbers, lengths)
    planner.plans()
    planner = JobPlanner(requests, numbers, machine, config, 2)
    done, _ = planner.plans()
    # The other one gives requests to the one that has ended.
    has_ended = np.isin(numbers, np.concatenate(done.sides))
    progress = JobProgress(
        np.where(has_ended, 0, 1).astype(np.int32),
        has_ended,
        np.where(has_ended, 0.0, 1.0),
        whole=True,
    )
    planner.plans(progress, ShardSpeeds.equal(2))
