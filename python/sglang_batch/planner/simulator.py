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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .cost_model import CostModel
from .density import read_len
from .kv_forecast import make_forecast
from .prefix_tree import PrefixTree
from .requests import Floats, Int32s, Int64s
from .sim_cache import LRU, PLANNED, make_cache
from .sim_loop import run_steps
from .sim_state import (
    NONE,
    REQUEST,
    Engine,
    Queue,
    Sim,
    make_lists,
    make_sides,
    make_state,
)

NUM_SAMPLES = 1024


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How the simulated engine is set up.

    kv_capacity_tokens: room for KV.
    step_tokens: most tokens of a step, prompts and decodes together; what SGLang calls
        ``chunked_prefill_size`` when chunks are mixed.
    max_running: most requests at once; None for as many as the KV holds.
    min_step_tokens: see :class:`~.sim_state.Engine`.
    batch_multiple: BlendServe section 4 runs batches in multiples of 128.
    closed_loop: whether the dual scanner's prefill budget follows what each step needs;
        otherwise it is the average of BlendServe's Algorithm 3.
    plan_aware_eviction: evict what the plan needs last; otherwise least recently used.
    as_sglang: whether steps go as in SGLang under our scheduler. Otherwise the engine
        is the textbook's: each output token takes a decode step, siblings share a
        prefix in the step that computes it, and a request that has to give up its KV
        computes it again. In SGLang the first output token comes with the prompt;
        siblings wait for the step after; a request holds its KV for one step after
        its last, and decodes in it too unless it ended by its limit; KV is taken as
        prompts are computed; one prompt at most is partly computed, and goes first;
        requests that give up their KV are parked; the KV left free and the estimates
        follow what was observed.
    """

    kv_capacity_tokens: int
    step_tokens: int = 2048
    max_running: int | None = None
    min_step_tokens: int = 512
    batch_multiple: int = 1
    closed_loop: bool = True
    plan_aware_eviction: bool = True
    as_sglang: bool = False

    def __post_init__(self) -> None:
        for name in (
            "kv_capacity_tokens",
            "step_tokens",
            "min_step_tokens",
            "batch_multiple",
            "max_running",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value!r} must be 1 or more.")


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
    num_left: int = 0,
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
        num_left: requests of ``order`` that are on the left side.

    Raises:
        ConfigError: a request needs more KV than there is.
    """
    leaves = tree.order
    check_capacity(tree, output_len, limits.kv_capacity_tokens)
    output_tokens = int(np.maximum(output_len, 1).sum(dtype=np.int64))
    if estimate is None:
        estimate = output_len.astype(np.float64)
    if estimate_sq is None:
        estimate_sq = estimate**2
    if max_new_tokens is None:
        max_new_tokens = np.full(len(leaves), np.iinfo(np.int32).max, dtype=np.int32)
    requests = np.zeros(len(leaves), REQUEST)
    requests["input_len"] = tree.input_len
    requests["own"] = tree.input_len - tree.depth[tree.leaf_parent]
    requests["node"] = tree.leaf_parent
    requests["output_len"] = np.maximum(output_len[leaves], 1)
    requests["max_new_tokens"] = max_new_tokens[leaves]
    state = make_state(len(leaves))
    state["compute_planned"], state["kv_read_planned"] = planned_work(
        tree, cost, estimate, estimate_sq, as_sglang=limits.as_sglang
    )
    if limits.as_sglang:
        estimate, estimate_sq = decode_steps(estimate, estimate_sq)
        _count_decode_steps(requests)
    requests["read_len"] = read_len(tree, cost)
    requests["estimate_mean"] = estimate[leaves]
    requests["estimate_sq"] = estimate_sq[leaves]
    requests["event"] = NONE
    longest = int(requests["output_len"].max(initial=1))
    sim = Sim(
        engine=_engine(cost, limits),
        queue=_queue(tree, order, density, num_left),
        requests=requests,
        state=state,
        sides=make_sides(),
        lists=make_lists(len(leaves), longest),
        cache=make_cache(tree, PLANNED if limits.plan_aware_eviction else LRU),
        forecast=make_forecast(int(estimate.max(initial=1.0))),
    )
    samples = np.zeros((3, NUM_SAMPLES))
    stride = run_steps(sim, samples)
    return _result(tree, limits, sim, samples, stride, output_tokens)


def decode_steps(estimate: Floats, estimate_sq: Floats) -> tuple[Floats, Floats]:
    """Moments of an answer's decode steps in SGLang, from those of its length.

    The first token comes with the prompt: an answer of ``d`` tokens takes ``d - 1``.
    """
    steps = np.maximum(estimate - 1.0, 0.0)
    return steps, np.maximum(estimate_sq - 2.0 * estimate + 1.0, steps**2)


def _count_decode_steps(requests: NDArray[Any]) -> None:
    """Replace lengths in tokens by decode steps.

    That a request ended by its limit is known in time to leave it out of the next
    step; one that stops by itself decodes once more.
    """
    in_time = requests["output_len"] >= requests["max_new_tokens"]
    requests["ends_in_time"] = in_time
    requests["max_new_tokens"] = np.maximum(requests["max_new_tokens"] - 1, 0)
    requests["output_len"] -= in_time


def check_capacity(tree: PrefixTree, output_len: Int32s, capacity: int) -> None:
    """Whether every request fits on its own.

    Raises:
        ConfigError: one does not.
    """
    needed = tree.input_len + np.maximum(output_len[tree.order], 1)
    if len(needed) and needed.max() > capacity:
        raise ConfigError(
            f"a request needs {needed.max()} tokens of KV, the capacity is {capacity}; "
            "leave it out or give the engine more memory."
        )


def _queue(
    tree: PrefixTree, order: Int64s, density: Floats | None, num_left: int
) -> Queue:
    n = len(order)
    leaf_of = np.empty(n, dtype=np.int64)
    leaf_of[tree.order] = np.arange(n)
    by_rank = leaf_of[order]
    rank = np.empty(n, dtype=np.int64)
    place = np.empty(n, dtype=np.int64)
    places = np.arange(n)
    place[by_rank] = places
    # Taken from both ends, a request comes as soon as its distance from the nearer.
    rank[by_rank] = places if density is None else np.minimum(places, n - 1 - places)
    return Queue(
        order=by_rank,
        place=place,
        rank=rank,
        density=np.zeros(n) if density is None else density,
        dual=density is not None,
        num_left=num_left,
    )


def _engine(cost: CostModel, limits: EngineLimits) -> Engine:
    return Engine(
        kv_capacity=limits.kv_capacity_tokens,
        max_running=limits.max_running or np.iinfo(np.int32).max,
        step_tokens=limits.step_tokens,
        min_step_tokens=limits.min_step_tokens,
        batch_multiple=limits.batch_multiple,
        closed_loop=limits.closed_loop,
        as_sglang=limits.as_sglang,
        shared_kv_read_once=cost.shared_kv_read_once,
        # Whole numbers would be compiled for anew.
        token_time_s=float(cost.token_time_s),
        attention_time_s=float(cost.attention_time_s),
        kv_read_time_s=float(cost.kv_read_time_s),
        weight_read_time_s=float(cost.weight_read_time_s),
        interference_exponent=float(cost.interference_exponent),
    )


def planned_work(
    tree: PrefixTree,
    cost: CostModel,
    estimate: Floats,
    estimate_sq: Floats,
    *,
    as_sglang: bool = False,
) -> tuple[float, float]:
    """Compute and memory time of the whole job by the estimates, in seconds.

    estimate, estimate_sq: float64 ``[n]`` by request, moments of its output length.
    as_sglang: whether the first output token comes with the prompt.
    """
    least = 1
    if as_sglang:
        estimate, estimate_sq = decode_steps(estimate, estimate_sq)
        least = 0
    lengths = estimate[tree.order]
    computed = tree.num_unique_tokens + np.maximum(least, np.rint(lengths)).sum()
    before = tree.lcp.astype(np.float64) ** 2
    attended = (tree.input_len.astype(np.float64) ** 2 - before).sum()
    compute = computed * cost.token_time_s + attended * cost.attention_time_s
    reads = read_len(tree, cost)
    memory = cost.memory_time_s(reads, lengths, estimate_sq[tree.order])
    return float(compute), float(memory.sum())


def _result(
    tree: PrefixTree,
    limits: EngineLimits,
    sim: Sim,
    samples: Floats,
    stride: int,
    output_tokens: int,
) -> Simulation:
    state = sim.state[0]
    num_steps = int(state["step"] - state["idle"]) - 1
    held = state["kv_steps"] / max(1, num_steps)
    return Simulation(
        seconds=float(state["seconds"]),
        num_steps=num_steps,
        compute_s=float(state["compute"]),
        memory_s=float(state["memory"]),
        prompt_tokens=tree.num_tokens,
        output_tokens=output_tokens,
        prefilled_tokens=int(state["prefilled"]),
        cached_tokens=int(state["cached"]),
        recomputed_tokens=int(state["recomputed"]),
        retractions=int(state["retractions"]),
        peak_kv_tokens=int(state["peak_kv"]),
        mean_kv_share=float(held / limits.kv_capacity_tokens),
        admission_order=tree.order[sim.lists.admitted],
        samples=samples[:, : -(-num_steps // stride)],
    )
