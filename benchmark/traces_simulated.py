"""BlendServe's traces planned and simulated: whole, and split over several devices."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from planner_stages import A100

from sglang_batch.planner.costs.bounds import lower_bounds
from sglang_batch.planner.costs.tree_work import leaf_work
from sglang_batch.planner.machine_model import EngineLimits
from sglang_batch.planner.ordering.order import OrderSettings
from sglang_batch.planner.ordering.order_functions import make_order
from sglang_batch.planner.output_lengths.estimates import (
    OutputEstimates,
    OutputLengthEstimator,
)
from sglang_batch.planner.output_lengths.sample import choose_sample
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree, build_prefix_tree
from sglang_batch.planner.requests import Int32s, Int64s, PlanRequests
from sglang_batch.planner.sharding.partition import partition, shard_jobs
from sglang_batch.planner.simulator.simulator import Simulation, simulate
from sglang_batch.prediction.synthetic_jobs import TRACES
from sglang_batch.prediction.workloads.mix import Workload, blend

# 60 GB for KV at 128 KiB a token, as in BlendServe 5.3.
KV_CAPACITY_TOKENS = int(60e9 / 131_072)
DATA_PARALLEL = (2, 4, 8)
SIMULATOR_REPEATS = 3


@dataclass(frozen=True, slots=True)
class SplitFigures:
    """A job on several devices.

    seconds, bounds: of each shard, simulated and at least.
    sharing_lost: of the prompt tokens that the whole job shares.
    speed_up: over one device, by the slowest shard.
    """

    num_shards: int
    seconds: list[float]
    bounds: list[float]
    sharing_lost: float
    speed_up: float

    @property
    def makespan_spread(self) -> float:
        """How much longer the slowest shard takes than the fastest."""
        return max(self.seconds) / min(self.seconds) - 1.0


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """A trace on one device, and its splits.

    sharing_kept: prefix sharing ratio achieved, of the optimal one.
    of_bound: lower bound of any order's time / this order's time.
    simulator_s: how long the simulator itself took.
    """

    seconds: float
    num_steps: int
    sharing_kept: float
    of_bound: float
    simulator_s: float
    splits: list[SplitFigures]


@dataclass(frozen=True, slots=True)
class _Job:
    """A job whose true lengths only the simulated engine and the bounds use.

    sample: requests that run first, for the estimates to learn from.
    """

    tree: PrefixTree
    requests: PlanRequests
    output_len: Int32s
    estimates: OutputEstimates
    sample: Int64s

    def lower_bound_s(self) -> float:
        found = lower_bounds(
            self.tree, A100, self.output_len, KV_CAPACITY_TOKENS, as_sglang=False
        )
        return found.tightest_s


def simulate_trace(trace: int, num_requests: int, seed: int) -> TraceFigures:
    """One of BlendServe's traces. Unknown lengths are estimated from a 1 % sample."""
    times = A100.token_time_s, A100.kv_read_time_s
    job = _sampled(blend(*TRACES[trace], num_requests, seed, *times), seed)
    runs = [_run(job) for _ in range(SIMULATOR_REPEATS)]
    whole = runs[0][0]
    sharing = whole.achieved_prefix_sharing_ratio / job.tree.prefix_sharing_ratio
    return TraceFigures(
        seconds=whole.seconds,
        num_steps=whole.num_steps,
        sharing_kept=sharing,
        of_bound=job.lower_bound_s() / whole.seconds,
        simulator_s=min(seconds for _, seconds in runs),
        splits=[_split(job, whole.seconds, k) for k in DATA_PARALLEL],
    )


def _sampled(workload: Workload, seed: int) -> _Job:
    requests = workload.requests
    tree = build_prefix_tree(requests.tokens, requests.offsets)
    sample = choose_sample(tree, requests, share=0.01, seed=seed)
    estimator = OutputLengthEstimator(tree, requests)
    estimator.observe(sample, workload.output_len[sample])
    return _Job(tree, requests, workload.output_len, estimator.estimates(), sample)


def _run(job: _Job) -> tuple[Simulation, float]:
    """The job in dual-scan order, and how long the simulator took."""
    mean, mean_sq = job.estimates.est_output_len, job.estimates.est_output_len_sq
    order = make_order(
        "dual-scan", job.tree, job.requests, A100, job.estimates, OrderSettings()
    ).beginning_with(job.sample)
    start = time.perf_counter()
    done = simulate(
        job.tree,
        A100,
        EngineLimits(KV_CAPACITY_TOKENS, step_tokens=8192),
        order=order,
        output_len=job.output_len,
        est_output_len=mean,
        est_output_len_sq=mean_sq,
        max_new_tokens=job.requests.max_new_tokens,
    )
    return done, time.perf_counter() - start


def _split(job: _Job, whole_s: float, num_shards: int) -> SplitFigures:
    mean, mean_sq = job.estimates.est_output_len, job.estimates.est_output_len_sq
    work = leaf_work(job.tree, A100, mean, mean_sq)
    cut = partition(job.tree, A100, work, num_shards)
    shards = []
    for number in range(num_shards):
        (part,) = shard_jobs(job.tree, job.requests, [cut.requests_of(number)])
        index = part.index
        estimates = OutputEstimates(mean[index], mean_sq[index])
        sample = np.flatnonzero(np.isin(index, job.sample))
        shards.append(
            _Job(part.tree, part.requests, job.output_len[index], estimates, sample)
        )
    seconds = [_run(shard)[0].seconds for shard in shards]
    return SplitFigures(
        num_shards=num_shards,
        seconds=seconds,
        bounds=[shard.lower_bound_s() for shard in shards],
        sharing_lost=cut.lost_tokens
        / (job.tree.num_tokens - job.tree.num_unique_tokens),
        speed_up=whole_s / max(seconds),
    )
