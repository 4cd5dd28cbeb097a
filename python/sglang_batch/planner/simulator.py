"""An iteration-level simulator of a serving engine: what would this plan take?

Every step decodes all running requests by one token and computes some prompt tokens
beside them (continuous batching, chunked prefill, mixed batches). KV is counted token
by token, shared prefixes once. A step takes the overlap of its compute and its memory
time (:func:`~.cost_model.overlapped`). True output lengths are hidden from admission:
it sees estimates, and learns a length when the request ends.

What it leaves out: kernel launch, sampling and scheduling time, page granularity.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from .cost_model import CostModel
from .kv_forecast import make_forecast
from .prefix_tree import PrefixTree
from .requests import Floats, Int32s, Int64s
from .sim_cache import LRU, PLANNED, make_cache
from .sim_loop import (
    CACHED,
    COMPUTE,
    COMPUTE_LEFT,
    KV_STEPS,
    MAKESPAN,
    MEMORY,
    MEMORY_LEFT,
    PEAK_KV,
    PREFILLED,
    RECOMPUTED,
    RETRACTIONS,
    STEP,
    Engine,
    Live,
    Queue,
    Requests,
    Work,
    make_state,
    run_steps,
)

NUM_SAMPLES = 1024


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How the simulated engine is set up.

    kv_capacity_tokens: room for KV.
    step_tokens: most tokens of a step, prompts and decodes together; what SGLang calls
        ``chunked_prefill_size`` when chunks are mixed.
    max_running: most requests at once; None for as many as the KV holds.
    min_step_tokens: see :class:`~.sim_loop.Engine`.
    batch_multiple: BlendServe section 4 runs batches in multiples of 128.
    plan_aware_eviction: evict what the plan needs last; otherwise least recently used.
    """

    kv_capacity_tokens: int
    step_tokens: int = 2048
    max_running: int | None = None
    min_step_tokens: int = 512
    batch_multiple: int = 1
    plan_aware_eviction: bool = True


@dataclass(frozen=True, slots=True)
class Simulation:
    """How a job went.

    seconds: makespan. compute_s, memory_s: the sums of all steps' times.
    cached_tokens: prompt tokens found in the cache on first admission.
    recomputed_tokens: computed again: after a retraction, or because a fully cached
        prompt still needs its last token. ``prefilled_tokens`` = prompt tokens
        - ``cached_tokens`` + ``recomputed_tokens``.
    mean_kv_share: KV in use, of the capacity, in the mean over steps.
    admission_order: int64 ``[n]``, requests in the order of their admission.
    samples: float64 ``[3, s]``: seconds, compute and memory time of the steps, a fixed
        number of steps to a column.
    """

    seconds: float
    num_steps: int
    compute_s: float
    memory_s: float
    prompt_tokens: int
    output_tokens: int
    prefilled_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    retractions: int
    peak_kv_tokens: int
    mean_kv_share: float
    admission_order: Int64s
    samples: Floats

    @property
    def total_throughput(self) -> float:
        """Prompt and output tokens per second."""
        tokens = self.prompt_tokens + self.output_tokens
        return tokens / self.seconds if self.seconds else 0.0

    @property
    def achieved_prefix_sharing_ratio(self) -> float:
        """Share of the prompt tokens that were not computed, recomputation deducted."""
        if not self.prompt_tokens:
            return 0.0
        return 1.0 - self.prefilled_tokens / self.prompt_tokens


def simulate(
    tree: PrefixTree,
    cost: CostModel,
    limits: EngineLimits,
    *,
    order: Int64s,
    output_len: Int32s,
    estimate: Floats | None = None,
    estimate_sq: Floats | None = None,
    max_new_tokens: Int32s | None = None,
    density: Floats | None = None,
) -> Simulation:
    """Run a job in a given order.

    Args:
        order: int64 ``[n]``, requests in the order of their turn.
        output_len: int32 ``[n]`` by request, the true lengths.
        estimate, estimate_sq: float64 ``[n]`` by request, what admission believes;
            the truth if not given.
        max_new_tokens: int32 ``[n]`` by request, which estimates do not exceed.
        density: float64 ``[n]`` by rank in ``order``. With it the dual scanner takes
            the order from both ends; without, requests come in order.

    Raises:
        ConfigError: a request needs more KV than there is.
    """
    leaves = tree.order
    check_capacity(tree, output_len, limits.kv_capacity_tokens)
    if estimate is None:
        estimate = output_len.astype(np.float64)
    if estimate_sq is None:
        estimate_sq = estimate**2
    if max_new_tokens is None:
        max_new_tokens = np.full(len(leaves), np.iinfo(np.int32).max, dtype=np.int32)
    work = Work(
        input_len=tree.input_len,
        output_len=np.maximum(output_len[leaves], 1).astype(np.int32),
        leaf_parent=tree.leaf_parent,
        max_new_tokens=max_new_tokens[leaves],
        estimate=estimate[leaves],
        estimate_sq=estimate_sq[leaves],
    )
    queue = _queue(tree, order, density)
    engine = _engine(cost, limits)
    longest = int(max(work.output_len.max(initial=1), estimate.max(initial=1.0)))
    requests, live = make_state(len(leaves), len(tree.parent), longest)
    live.sums[COMPUTE_LEFT], live.sums[MEMORY_LEFT] = _expected(tree, cost, work)
    samples = np.zeros((3, NUM_SAMPLES))
    stride = run_steps(
        work,
        engine,
        queue,
        make_cache(tree, PLANNED if limits.plan_aware_eviction else LRU),
        make_forecast(longest),
        requests,
        live,
        samples,
    )
    return _result(tree, work, limits, requests, live, samples, stride)


def check_capacity(tree: PrefixTree, output_len: Int32s, capacity: int) -> None:
    """Whether every request fits on its own.

    Raises:
        ConfigError: one does not.
    """
    needed = tree.input_len + output_len[tree.order]
    if len(needed) and needed.max() > capacity:
        raise ConfigError(
            f"a request needs {needed.max()} tokens of KV, the capacity is {capacity}; "
            "leave it out or give the engine more memory."
        )


def _queue(tree: PrefixTree, order: Int64s, density: Floats | None) -> Queue:
    n = len(order)
    leaf_of = np.empty(n, dtype=np.int64)
    leaf_of[tree.order] = np.arange(n)
    by_rank = leaf_of[order]
    rank = np.empty(n, dtype=np.int64)
    places = np.arange(n)
    # Taken from both ends, a request comes as soon as its distance from the nearer.
    rank[by_rank] = places if density is None else np.minimum(places, n - 1 - places)
    return Queue(
        order=by_rank,
        rank=rank,
        density=np.zeros(n) if density is None else density,
        dual=density is not None,
    )


def _engine(cost: CostModel, limits: EngineLimits) -> Engine:
    return Engine(
        kv_capacity=limits.kv_capacity_tokens,
        max_running=limits.max_running or np.iinfo(np.int32).max,
        step_tokens=limits.step_tokens,
        min_step_tokens=limits.min_step_tokens,
        batch_multiple=limits.batch_multiple,
        shared_kv_read_once=cost.shared_kv_read_once,
        token_time_s=cost.token_time_s,
        attention_time_s=cost.attention_time_s,
        kv_read_time_s=cost.kv_read_time_s,
        weight_read_time_s=cost.weight_read_time_s,
        interference_exponent=cost.interference_exponent,
    )


def _expected(tree: PrefixTree, cost: CostModel, work: Work) -> tuple[float, float]:
    """Compute and memory time of the whole job by the estimates, in seconds."""
    computed = tree.num_unique_tokens + np.maximum(1, np.rint(work.estimate)).sum()
    before = tree.lcp.astype(np.float64) ** 2
    attended = (tree.input_len.astype(np.float64) ** 2 - before).sum()
    compute = computed * cost.token_time_s + attended * cost.attention_time_s
    memory = cost.memory_time_s(work.input_len, work.estimate, work.estimate_sq).sum()
    return float(compute), float(memory)


def _result(
    tree: PrefixTree,
    work: Work,
    limits: EngineLimits,
    requests: Requests,
    live: Live,
    samples: Floats,
    stride: int,
) -> Simulation:
    counters, sums = live.counters, live.sums
    num_steps = int(counters[STEP]) - 1
    return Simulation(
        seconds=float(sums[MAKESPAN]),
        num_steps=num_steps,
        compute_s=float(sums[COMPUTE]),
        memory_s=float(sums[MEMORY]),
        prompt_tokens=int(work.input_len.sum(dtype=np.int64)),
        output_tokens=int(work.output_len.sum(dtype=np.int64)),
        prefilled_tokens=int(counters[PREFILLED]),
        cached_tokens=int(counters[CACHED]),
        recomputed_tokens=int(counters[RECOMPUTED]),
        retractions=int(counters[RETRACTIONS]),
        peak_kv_tokens=int(counters[PEAK_KV]),
        mean_kv_share=float(
            counters[KV_STEPS] / max(1, num_steps) / limits.kv_capacity_tokens
        ),
        admission_order=tree.order[requests.admitted_order],
        samples=samples[:, : num_steps // stride + 1],
    )
