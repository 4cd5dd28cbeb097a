"""1,000 engines whose unsent requests move while a job runs: how far apart they end.

The planner is that of a job (``JobPlanner``): it learns output lengths from the answers so far,
and whenever an engine has few requests left to start, requests that no engine has started move.
A fifth of the engines runs at half the speed that the first plan assumes. The planner learns
speeds from the work that each engine has answered in its time, by the cost model.

An engine is a row of counters. It runs a few requests at a time, in the order of its plan. Each
step computes the prompts that join and a token of each request, and takes as long as the cost
model says, over the engine's speed. An engine keeps all prefixes that it has computed. The next
step is always that of the engine whose time is least, and a plan takes no time.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from planner_stages import A100
from report import Figure, print_table

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.job import job_shards
from sglang_batch.job.job_planner import JobPlanner
from sglang_batch.job.job_shards import JobProgress, ShardPlan
from sglang_batch.job.replicas import MIN_AHEAD
from sglang_batch.planner.compiled import jit
from sglang_batch.planner.costs.cost_model import overlapped
from sglang_batch.planner.costs.tree_work import leaf_compute, leaf_work
from sglang_batch.planner.machine_model import EngineLimits, Machine
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree, build_prefix_tree
from sglang_batch.planner.requests import Floats, Int32s, Int64s
from sglang_batch.planner.sharding.partition import partition, shared_within_shards
from sglang_batch.planner.sharding.rebalance import rebalance
from sglang_batch.planner.sharding.speeds import ShardSpeeds
from sglang_batch.prediction.workloads.mix import Workload, assemble, seeds_of
from sglang_batch.prediction.workloads.sources import Source, draw_sample

SEED = 0
ENGINES, PER_ENGINE = 1000, 1000
# Requests that an engine runs at a time. So few, because the job is small: a request must not take
# a larger part of it than of a job of hours on engines with many rows.
ROWS = 4
SLOW_SPEED = 0.5
MOST_APART = 1.02
MOST_CPU_S = 2.0
# Llama-3.1-8B on an A100, with the reading of its weights in every step.
COST = replace(A100, weight_read_time_s=16e9 / 2.039e12)
MACHINE = Machine(COST, EngineLimits(1 << 20, max_running=ROWS))
# Share of the unsent requests that has to be started before they move again.
FEWER = 15 / 16
RUNNING_LEFT = 0.5

# Tasks of a job, each with an instruction of its own: labels for the same text, values from it,
# and free text of three lengths. The longest answers have 128 tokens.
INSTRUCTION = 40
TASKS = {
    Source("labels", 120, 0.5, 8, 100, 0.5, 16, 1 << 30, 20, 0.5): 0.35,
    Source("values", 160, 0.5, 40, 2_200, 0.4, 128, 1 << 30, 8, 0.5): 0.3,
    Source("titles", 100, 0.8, 20, 520, 0.0, 64): 0.1,
    Source("summaries", 200, 0.8, 80, 7_200, 0.0, 128): 0.15,
    Source("letters", 80, 0.8, 100, 10_800, 0.2, 128, 1 << 30, 4, 0.5): 0.1,
}
# Less even ones, of 256.
LONGER_TASKS = {
    Source("labels", 120, 0.5, 4, 20, 0.5, 16, 1 << 30, 20, 0.5): 0.35,
    Source("values", 160, 0.5, 30, 1_350, 0.4, 128, 1 << 30, 8, 0.5): 0.3,
    Source("titles", 100, 0.8, 15, 300, 0.0, 64): 0.1,
    Source("summaries", 200, 0.8, 80, 8_000, 0.0, 256): 0.15,
    Source("letters", 80, 0.8, 160, 32_000, 0.2, 256, 1 << 30, 4, 0.5): 0.1,
}


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part."""
    engines, each = (40, 200) if quick else (ENGINES, PER_ENGINE)
    job, longer = (_Job.of(tasks, engines * each) for tasks in (TASKS, LONGER_TASKS))
    speed = np.ones(engines)
    slow = np.random.default_rng(SEED).permutation(engines)[: engines // 5]
    speed[slow] = SLOW_SPEED
    still = _run(job, speed, moves=False)
    moved = _run(job, speed, moves=True)
    runs = {
        "no moves": still,
        "moves": moved,
        "moves, all at full speed": _run(job, np.ones(engines), moves=True),
        "moves, longest answers twice as long": _run(longer, speed, moves=True),
    }
    print_table(
        f"{len(job.workload)} requests on {engines} engines, a fifth at half speed",
        ("", "slowest/mean", "fastest/mean", "s", "longest, %", "lost, %", "plans",
         "CPU s"),
        [
            (
                name,
                round(run.apart, 4),
                round(float(run.ends.min() / run.ends.mean()), 4),
                round(float(run.ends.max()), 1),
                round(100 * run.longest, 1),
                round(100 * run.lost, 2),
                len(run.plan_s),
                round(sum(run.plan_s), 1),
            )
            for name, run in runs.items()
        ],
    )  # fmt: skip
    figures = [
        Figure("slowest/mean end", moved.apart, "", ("<=", MOST_APART),
               f"{still.apart:.3g} without moves"),
        Figure("sharing lost", 100 * moved.lost, "%", None,
               f"{100 * still.lost:.2g} % without moves"),
        Figure("plans with moves", len(moved.plan_s), "", None,
               f"{sum(moved.plan_s):.3g} CPU s, with estimates and orders"),
        Figure("longest of these plans", max(moved.plan_s), "CPU s"),
        Figure("longest moves", max(moved.move_s), "CPU s", ("<=", MOST_CPU_S)),
        Figure("first cut", _first_cut_s(job, engines), "CPU s", ("<=", MOST_CPU_S)),
    ]  # fmt: skip
    return [replace(each, target=None) for each in figures] if quick else figures


def _first_cut_s(job: _Job, engines: int) -> float:
    """CPU seconds to cut the job, where all answers are as long."""
    mean = np.full(len(job.workload), float(job.workload.output_len.mean()))
    work = leaf_work(job.tree, COST, mean, mean**2)
    seconds: list[float] = []
    with _cpu_time(seconds):
        partition(job.tree, COST, work, engines)
    return seconds[0]


# The job --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Job:
    """The requests, and their costs with their true lengths.

    position: int64 by request, its leaf.
    compute_s, memory_s: float64 by leaf, by the cost model, where a prefix is spread over the
        requests that share it.
    """

    workload: Workload
    tree: PrefixTree
    position: Int64s
    compute_s: Floats
    memory_s: Floats

    @classmethod
    def of(cls, tasks: Mapping[Source, float], num_requests: int) -> _Job:
        seeds = seeds_of(SEED, "stealing")
        rng = np.random.default_rng(seeds)
        samples = []
        for task, share in tasks.items():
            sample = draw_sample(task, round(share * num_requests), rng)
            samples.append(
                replace(
                    sample,
                    prefix_len=sample.prefix_len + INSTRUCTION,
                    instruction_len=INSTRUCTION,
                )
            )
        workload = assemble(samples, "stealing", seeds, known=False)
        tree = build_prefix_tree(workload.requests.tokens, workload.requests.offsets)
        position = np.empty_like(tree.order)
        position[tree.order] = np.arange(len(workload))
        lengths = workload.output_len.astype(np.float64)
        work = leaf_work(tree, COST, lengths, lengths**2)
        weights_s = COST.weight_read_time_s / ROWS * lengths[tree.order]
        compute = leaf_compute(tree, COST, work)
        return cls(workload, tree, position, compute, work.memory_s + weights_s)


# The engines ----------------------------------------------------------------------------


class _Engines(NamedTuple):
    """``k`` engines with ``w`` rows, and the leaves of their job.

    clock, ended: float64 ``[k]``, seconds until now and until the last answer.
    speed: float64 ``[k]``.
    row: int32 ``[k, w]``, the leaf in each row, -1 for none.
    tokens, known: int32 ``[k, w]``, of the answer so far, and how many of them the job
        knows of: an answer to a request that started later is shorter than this one.
    start: int64 ``[k, w]``, the number of requests that had started before.
    queue: int32 ``[n]``, leaves to start. Engine e has ``queue[begin[e]:end[e]]``.
    has_prefix: uint8 ``[k, m / 8]``, a bit for each node of the tree.
    left: float64 ``[n]``, share of each leaf's work that is to be done.
    engine: int32 ``[n]``, of each leaf.
    """

    clock: Floats
    ended: Floats
    speed: Floats
    row: Int32s
    tokens: Int32s
    known: Int32s
    start: Int64s
    num_started: Int64s
    queue: Int32s
    begin: Int64s
    end: Int64s
    has_prefix: np.ndarray
    left: Floats
    engine: Int32s

    @classmethod
    def idle(cls, speed: Floats, num_leaves: int, num_nodes: int) -> _Engines:
        k = len(speed)
        return cls(
            clock=np.zeros(k),
            ended=np.zeros(k),
            speed=speed,
            row=np.full((k, ROWS), -1, np.int32),
            tokens=np.zeros((k, ROWS), np.int32),
            known=np.zeros((k, ROWS), np.int32),
            start=np.zeros((k, ROWS), np.int64),
            num_started=np.zeros(k, np.int64),
            queue=np.zeros(num_leaves, np.int32),
            begin=np.zeros(k, np.int64),
            end=np.zeros(k, np.int64),
            has_prefix=np.zeros((k, num_nodes // 8 + 1), np.uint8),
            left=np.ones(num_leaves),
            engine=np.full(num_leaves, -1, np.int32),
        )


class _Leaves(NamedTuple):
    """Of the job: as of the tree, and the true output lengths, int32 ``[n]`` by leaf."""

    parent: Int32s
    depth: Int32s
    leaf_parent: Int32s
    input_len: Int32s
    output_len: Int32s


@jit
def _advance(
    engines: _Engines, leaves: _Leaves, times: Floats, step_tokens: int, ahead: int,
    most_unsent: float,
) -> bool:  # fmt: skip
    """Run the engines until one has few requests to start and others more. False: to the end.

    Args:
        times: seconds per token, token of KV and reading of the weights, and the exponent
            of the law.
        ahead: requests that are not few.
        most_unsent: requests of all engines above which they run on.
    """
    unsent = 0
    heap = [(0.0, -1)]
    for e in range(len(engines.clock)):
        unsent += engines.end[e] - engines.begin[e]
        if engines.end[e] > engines.begin[e] or engines.row[e].max() >= 0:
            heap.append((engines.clock[e], e))
    heap = heap[1:]
    heapq.heapify(heap)
    while len(heap):
        e = heap[0][1]
        own = engines.end[e] - engines.begin[e]
        runs_dry = own < ahead and unsent <= most_unsent
        if runs_dry and (engines.end - engines.begin).max() > own + 1:
            return True
        prompt_tokens = _join(engines, leaves, e, step_tokens)
        unsent += engines.end[e] - engines.begin[e] - own
        if _step(engines, leaves, e, prompt_tokens, times):
            heapq.heapreplace(heap, (engines.clock[e], e))
        else:
            heapq.heappop(heap)
    return False


@jit
def _join(engines: _Engines, leaves: _Leaves, e: int, step_tokens: int) -> int:
    """Start requests in free rows. Returns the prompt tokens to compute."""
    new_tokens = 0
    for row in range(engines.row.shape[1]):
        if engines.begin[e] == engines.end[e] or new_tokens >= step_tokens:
            break
        if engines.row[e, row] >= 0:
            continue
        leaf = engines.queue[engines.begin[e]]
        engines.begin[e] += 1
        engines.row[e, row] = leaf
        engines.tokens[e, row] = engines.known[e, row] = 0
        engines.start[e, row] = engines.num_started[e]
        engines.num_started[e] += 1
        engines.engine[leaf] = e
        engines.left[leaf] = RUNNING_LEFT
        node = leaves.leaf_parent[leaf]
        new_tokens += leaves.input_len[leaf] - leaves.depth[node]
        while node > 0 and not engines.has_prefix[e, node // 8] >> (node % 8) & 1:
            engines.has_prefix[e, node // 8] |= 1 << (node % 8)
            above = leaves.parent[node]
            new_tokens += leaves.depth[node] - leaves.depth[above]
            node = above
    return new_tokens


@jit
def _step(
    engines: _Engines, leaves: _Leaves, e: int, prompt_tokens: int, times: Floats
) -> bool:
    """One step. Returns whether the engine has more to do."""
    kv_tokens, rows = 0, 0
    for row in range(engines.row.shape[1]):
        leaf = engines.row[e, row]
        if leaf >= 0:
            rows += 1
            kv_tokens += leaves.input_len[leaf] + engines.tokens[e, row]
    compute_s = (prompt_tokens + rows) * times[0]
    memory_s = kv_tokens * times[1] + times[2]
    engines.clock[e] += overlapped(compute_s, memory_s, times[3]) / engines.speed[e]
    for row in range(engines.row.shape[1]):
        leaf = engines.row[e, row]
        if leaf < 0:
            continue
        engines.tokens[e, row] += 1
        length = engines.tokens[e, row]
        if length < leaves.output_len[leaf]:
            continue
        rows -= 1
        engines.row[e, row] = -1
        engines.left[leaf] = 0.0
        engines.ended[e] = engines.clock[e]
        for other in range(engines.row.shape[1]):
            if engines.start[e, other] < engines.start[e, row]:
                engines.known[e, other] = max(engines.known[e, other], length - 1)
    return rows > 0 or engines.end[e] > engines.begin[e]


# The run --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """A job that was run.

    ends: float64 ``[k]``, seconds until each engine's last answer.
    lost: tokens computed again because several engines had their prefix, as a share of those
        that one engine would save.
    longest: steps of the longest answer at full speed, as a share of the mean end.
    plan_s, move_s: CPU seconds of each plan that moved requests, and of the moves in it.
    """

    ends: Floats = field(default_factory=lambda: np.zeros(0))
    lost: float = 0.0
    longest: float = 0.0
    plan_s: list[float] = field(default_factory=list)
    move_s: list[float] = field(default_factory=list)

    @property
    def apart(self) -> float:
        return float(self.ends.max() / self.ends.mean())


class _Head:
    """Plans a job and has the engines carry the plans out."""

    def __init__(self, job: _Job, speed: Floats) -> None:
        self._job = job
        k, n = len(speed), len(job.workload)
        tree = job.tree
        output_len = job.workload.output_len[tree.order]
        self._engines = _Engines.idle(speed, n, tree.num_nodes)
        self._leaves = _Leaves(
            tree.parent, tree.depth, tree.leaf_parent, tree.input_len, output_len
        )
        self._planned = np.zeros(n, np.int32)  # the engine of each leaf in the plan
        self._told = np.zeros(n, np.bool_)  # leaves whose answer the planner knows
        config = OfflineBatchConfig(policy="dfs", seed=SEED)
        self._planner = JobPlanner(
            job.workload.requests, np.arange(n), MACHINE, config, k
        )
        self.run = _Run()
        self._carry_out(self._planner.plans())

    def to_the_end(self, *, moves: bool) -> None:
        """Run the job. Requests move whenever an engine has few to start."""
        times = np.array(
            [COST.token_time_s, COST.kv_read_time_s, COST.weight_read_time_s,
             COST.interference_exponent]
        )  # fmt: skip
        unsent = float(len(self._told)) if moves else -1.0
        while _advance(
            self._engines, self._leaves, times, MACHINE.limits.step_tokens, MIN_AHEAD,
            FEWER * unsent,
        ):  # fmt: skip
            with _cpu_time(self.run.plan_s):
                self._plan()
            unsent = float((self._engines.end - self._engines.begin).sum())
        if self._engines.left.any():
            raise RuntimeError("Some requests were not answered.")
        self.run.ends = self._engines.ended
        step_s = COST.step_time_s(ROWS * COST.token_time_s, COST.weight_read_time_s)
        longest = float(self._leaves.output_len.max() * step_s)
        self.run.longest = longest / float(self.run.ends.mean())
        lcp = self._job.tree.lcp
        shared = shared_within_shards(lcp, self._engines.engine, len(self.run.ends))
        self.run.lost = 1 - float(shared.sum(dtype=np.int64) / lcp.sum(dtype=np.int64))

    def _plan(self) -> None:
        engines, order = self._engines, self._job.tree.order
        new = np.flatnonzero((engines.left == 0.0) & ~self._told)
        running = engines.known > 0
        leaves = np.concatenate([new, engines.row[running]])
        tokens = np.concatenate([self._leaves.output_len[new], -engines.known[running]])
        self._told[new] = True
        self._planner.observe(order[leaves], tokens.astype(np.int32))
        started = engines.engine >= 0
        position = self._job.position
        progress = JobProgress(
            np.where(started, engines.engine, self._planned)[position],
            started[position],
            engines.left[position],
            whole=True,
        )
        self._carry_out(self._planner.plans(progress, self._speeds()))

    def _speeds(self) -> ShardSpeeds:
        """Of the engines, by their answers since the job began."""
        engines, job = self._engines, self._job
        k = len(engines.clock)
        answered = np.flatnonzero(engines.left == 0.0)
        by = engines.engine[answered]
        count = np.maximum(np.bincount(by, minlength=k), 1)
        # Requests that run are as long as those that were answered, and half done.
        more = 1 + RUNNING_LEFT * (engines.row >= 0).sum(axis=1) / count
        compute = more * np.bincount(by, job.compute_s[answered], k)
        memory = more * np.bincount(by, job.memory_s[answered], k)
        measured = COST.step_time_s(compute, memory) / np.maximum(engines.clock, 1e-9)
        known = ShardSpeeds.equal(k)
        return known.corrected(np.where(measured > 0, measured, 1.0))

    def _carry_out(self, plans: list[ShardPlan]) -> None:
        """Queue the requests that have not started in the order of a plan."""
        engines = self._engines
        busy = (engines.row >= 0).any(axis=1) | (engines.end > engines.begin)
        now = engines.clock[busy].min(initial=np.inf)
        place = 0
        for e, plan in enumerate(plans):
            leaves = self._job.position[plan.sides[0]]
            unsent = leaves[engines.engine[leaves] < 0]
            engines.begin[e], engines.end[e] = place, place + len(unsent)
            engines.queue[place : place + len(unsent)] = unsent
            self._planned[unsent] = e
            place += len(unsent)
            if not busy[e] and np.isfinite(now):
                engines.clock[e] = max(engines.clock[e], now)


@contextmanager
def _cpu_time(seconds: list[float]) -> Iterator[None]:
    start = time.process_time()
    yield
    seconds.append(time.process_time() - start)


def _run(job: _Job, speed: Floats, *, moves: bool) -> _Run:
    head = _Head(job, speed)

    def timed(*args: Any) -> Int32s:
        with _cpu_time(head.run.move_s):
            return rebalance(*args)

    with patch.object(job_shards, "rebalance", timed):
        head.to_the_end(moves=moves)
    return head.run
