"""A step-by-step simulator of a serving engine, to predict how long an order takes.

Every step decodes all running requests by one token and computes prompt tokens in the
same batch (continuous batching, chunked prefill, mixed batches). KV is counted in pages,
shared prefixes once. A step takes the overlap of its compute and its memory time
(:func:`~..costs.cost_model.overlapped`), and the seconds that are neither. True output lengths are
hidden from admission, which uses estimates and learns a length when the request ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ..admission_rules.kv_forecast import make_forecast, make_padded_forecast
from ..costs.cost_model import ALWAYS_MIXED, CostModel, MixingCost
from ..costs.tree_work import decode_step_moments, planned_work, read_len
from ..kv_lengths.batch_state import make_batches
from ..kv_lengths.length_groups import BatchLaw, parking_pays
from ..machine_model import EngineLimits
from ..ordering.order import LengthKeys, Order
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Floats, Int32s, Int64s
from .engine_state import (
    NONE,
    PLACE,
    REQUEST,
    Queue,
    RowHeap,
    RowLengths,
    Sim,
    SimEngine,
    as_record,
    make_calendar,
    make_sides,
    make_state,
)
from .prefix_cache import LRU, PLANNED, make_cache
from .step_loop import run_steps

NUM_SAMPLES = 1024
# Of orders that are followed.
_NO_BATCHES = make_batches(0, 0)


@dataclass(frozen=True, slots=True)
class Simulation:
    """The run of a job.

    seconds: makespan.
    compute_s, memory_s: sums of all steps' compute and memory times, in seconds.
    cached_tokens: prompt tokens found in the cache on first admission.
    recomputed_tokens: tokens computed again, after a retraction or because a fully
        cached prompt still needs its last token. ``prefilled_tokens`` = prompt tokens
        - ``cached_tokens`` + ``recomputed_tokens``.
    mean_kv_share: KV in use over the capacity, as the mean over steps.
    admission_order: int64 ``[n]``, requests in the order of their admission.
    prompt_step, last_step: int64 ``[n]`` by request, the steps that completed its prompt and
        its answer.
    parked: times that a row left in a switch of batches, and came back.
    num_batches, mixed_steps: batches of similar length that were formed, and steps in which
        rows of more than one of them ran.
    samples: float64 ``[6, s]``, of the steps: seconds, compute and memory time, rows that
        decode, their tokens of KV, and those of the longest row. Each column is the sum of
        the same number of steps.
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
    prompt_step: Int64s
    last_step: Int64s
    samples: Floats
    parked: int = 0
    num_batches: int = 0
    mixed_steps: int = 0

    @property
    def total_throughput(self) -> float:
        """Prompt and output tokens per second."""
        tokens = self.prompt_tokens + self.output_tokens
        return tokens / self.seconds if self.seconds else 0.0

    @property
    def tail_s(self) -> float:
        """Seconds at the end in which fewer than half as many rows run as when the last of
        all joined, to within a sample."""
        seconds, rows = self.samples[0], self.samples[3]
        if not len(rows):
            return 0.0
        joined = int(np.flatnonzero(np.diff(rows, prepend=0.0) > 0).max(initial=0))
        full = np.flatnonzero(2 * rows >= rows[joined])
        return float(seconds[full[-1] + 1 :].sum())

    @property
    def achieved_prefix_sharing_ratio(self) -> float:
        """Share of the prompt tokens that were not computed, less recomputed tokens."""
        if not self.prompt_tokens:
            return 0.0
        return 1.0 - self.prefilled_tokens / self.prompt_tokens


def simulate(
    tree: PrefixTree,
    cost: CostModel,
    limits: EngineLimits,
    *,
    order: Order,
    output_len: Int32s,
    est_output_len: Floats | None = None,
    est_output_len_sq: Floats | None = None,
    max_new_tokens: Int32s | None = None,
) -> Simulation:
    """Run a job in a given order.

    Args:
        output_len: int32 ``[n]`` by request, the true lengths.
        est_output_len, est_output_len_sq: float64 ``[n]`` by request, both moments of the
            output length, for admission. None: the true lengths.
        max_new_tokens: int32 ``[n]`` by request, which estimates do not exceed.

    Raises:
        ConfigError: a request needs more KV than the engine has.
    """
    check_capacity(tree, output_len, limits)
    if est_output_len is None:
        est_output_len = output_len.astype(np.float64)
    if est_output_len_sq is None:
        est_output_len_sq = est_output_len**2
    # In the textbook engine, each output token takes a decode step.
    steps, steps_sq, least = est_output_len, est_output_len_sq, 1
    if limits.as_sglang:
        steps, steps_sq = decode_step_moments(steps, steps_sq)
        least = 0
    n = tree.num_requests
    state = make_state(n)
    state["compute_planned"], state["kv_read_planned"] = planned_work(
        tree, cost, steps, steps_sq, least
    )
    requests = _requests(tree, cost, limits, output_len, max_new_tokens)
    if order.lengths is not None:
        requests["key"] = order.lengths.key[tree.order]
        requests["family"] = order.lengths.family[tree.order]
    requests["est_decode_steps_mean"] = steps[tree.order]
    requests["est_decode_steps_sq"] = steps_sq[tree.order]
    eviction = PLANNED if limits.plan_aware_eviction else LRU
    engine = _engine(cost, limits)
    sim = Sim(
        engine=as_record(engine),
        table=cost.step_table,
        queue=Queue(
            dual=order.density is not None,
            num_left=order.num_left,
            rule=0 if order.lengths is None else order.lengths.rule,
        ),
        requests=requests,
        places=_places(tree, order, requests),
        calendar=make_calendar(int(requests["decode_steps"].max(initial=1))),
        notes=np.zeros(8 * n, np.int64),
        growing=np.zeros((2, limits.page_size), np.int64),
        state=state,
        sides=make_sides(),
        cache=make_cache(
            tree, eviction, limits.page_size, keeps_states=limits.keeps_states
        ),
        forecast=make_forecast(int(steps.max(initial=1.0)), limits.page_size),
    )
    heap = RowHeap(np.zeros(3 * n + 1, np.int64), np.zeros(3 * n + 1, np.int64))
    row_lengths = None
    if limits.dense or order.lengths is not None:
        row_lengths = _row_lengths(engine, limits, order.lengths, n)
    samples = np.zeros((6, NUM_SAMPLES))
    stride = run_steps(sim, heap, row_lengths, samples)
    output_tokens = int(np.maximum(output_len, 1).sum(dtype=np.int64))
    return _result(tree, limits, sim, row_lengths, samples, stride, output_tokens)


def check_capacity(tree: PrefixTree, output_len: Int32s, limits: EngineLimits) -> None:
    """Raise ConfigError unless every request fits on its own."""
    needed = tree.input_len + np.maximum(output_len[tree.order], 1)
    capacity = limits.kv_capacity_tokens // limits.page_size * limits.page_size
    if len(needed) and needed.max() > capacity:
        raise ConfigError(
            f"a request needs {needed.max()} tokens of KV, the capacity is {capacity}; "
            "leave it out or give the engine more memory."
        )


def _requests(
    tree: PrefixTree,
    cost: CostModel,
    limits: EngineLimits,
    output_len: Int32s,
    max_new_tokens: Int32s | None,
) -> NDArray[Any]:
    """``REQUEST [n]`` by leaf, without their estimates and lengths in batches."""
    requests = np.zeros(tree.num_requests, REQUEST)
    requests["input_len"] = tree.input_len
    requests["read_len"] = read_len(tree, cost)
    requests["more_reads"] = cost.more_reads(tree.input_len)
    if tree.media is not None:
        requests["media"] = tree.media.input_len
    shared = tree.depth[tree.leaf_parent] // limits.page_size * limits.page_size
    requests["own"] = tree.input_len - shared
    requests["node"] = tree.leaf_parent
    requests["decode_steps"] = np.maximum(output_len[tree.order], 1)
    requests["max_decode_steps"] = np.iinfo(np.int32).max
    if max_new_tokens is not None:
        requests["max_decode_steps"] = max_new_tokens[tree.order]
    if limits.as_sglang:
        # A request that ends by its limit is left out of the next step. One that stops by
        # itself decodes once more, where steps are overlapped.
        in_time = requests["decode_steps"] >= requests["max_decode_steps"]
        requests["max_decode_steps"] = np.maximum(requests["max_decode_steps"] - 1, 0)
        if limits.overlapped:
            requests["ends_in_time"] = in_time
            requests["decode_steps"] -= in_time
        else:
            requests["decode_steps"] -= 1
    requests["event"] = NONE
    return requests


def _places(tree: PrefixTree, order: Order, requests: NDArray[Any]) -> NDArray[Any]:
    """The order, as leaves. Sets each request's position in it, and how soon it is taken."""
    leaves, positions = tree.position[order.requests], np.arange(len(requests))
    places = np.zeros(len(requests), PLACE)
    places["leaf"], places["waits"] = leaves, 1
    requests["position"][leaves] = requests["rank"][leaves] = positions
    if order.density is not None:
        places["density"] = order.density
        # In an order taken from both ends, the distance from the nearer end counts.
        requests["rank"][leaves] = np.minimum(positions, positions[::-1])
    return places


def _row_lengths(
    engine: SimEngine, limits: EngineLimits, keys: LengthKeys | None, num_requests: int
) -> RowLengths:
    batches = _NO_BATCHES
    if keys is not None:
        batches = make_batches(num_requests, keys.rule, keys.max_wait_steps)
    law = BatchLaw(
        weight_s=engine.weight_read_time_s,
        read_s=engine.kv_read_time_s,
        row_share=engine.row_share,
        padded=engine.padded,
        capacity=float(engine.kv_capacity),
        max_rows=engine.max_running,
        parks=not engine.as_sglang
        or (limits.prefetches and parking_pays(engine.row_share, padded=engine.padded)),
    )
    return RowLengths(
        cells=make_padded_forecast(num_requests + 1 if limits.dense else 0),
        batches=batches,
        law=law,
    )


def _engine(cost: CostModel, limits: EngineLimits) -> SimEngine:
    return SimEngine(
        kv_capacity=limits.kv_capacity_tokens // limits.page_size * limits.page_size,
        page_size=limits.page_size,
        max_running=limits.max_running or np.iinfo(np.int32).max,
        step_tokens=limits.step_tokens,
        min_step_tokens=limits.min_step_tokens,
        closed_loop=limits.closed_loop,
        as_sglang=limits.as_sglang,
        shared_kv_read_once=cost.shared_kv_read_once,
        # Integers would make numba compile all steps again.
        token_time_s=float(cost.token_time_s),
        attention_time_s=float(cost.attention_time_s),
        encoder_token_time_s=float(cost.encoder_token_time_s),
        kv_read_time_s=float(cost.kv_read_time_s),
        weight_read_time_s=float(cost.weight_read_time_s),
        interference_exponent=float(cost.interference_exponent),
        split_exponent=float(cost.split_exponent),
        row_share=float(cost.row_share),
        padded=bool(cost.padded),
        dense=limits.dense,
        second=limits.second_pool,
        extras=cost.extras,
        mixing=MixingCost.of(cost) or ALWAYS_MIXED,
    )


def _result(
    tree: PrefixTree,
    limits: EngineLimits,
    sim: Sim,
    row_lengths: RowLengths | None,
    samples: Floats,
    stride: int,
    output_tokens: int,
) -> Simulation:
    state = sim.state
    batches = (_NO_BATCHES if row_lengths is None else row_lengths.batches).state[0]
    num_steps = int(state["step"] - state["idle"]) - 1
    held = state["kv_steps"] / max(1, num_steps)
    begin = sim.requests["begin"]
    end = begin + sim.requests["decode_steps"] - sim.requests["generated"]
    return Simulation(
        seconds=float(state["seconds"]),
        num_steps=num_steps + int(state["apart"]),
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
        admission_order=tree.order[sim.places["admitted"]],
        prompt_step=begin[tree.position],
        last_step=end[tree.position],
        samples=samples[:, : -(-num_steps // stride)],
        parked=int(state["parked"]),
        num_batches=int(batches["num_batches"]),
        mixed_steps=int(batches["mixed_ticks"]),
    )
