"""The simulator's state, in records that compiled code changes in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..admission_rules.kv_forecast import KvForecast, PaddedForecast
from ..compiled import jit_in_place
from ..costs.cost_model import MixingCost, StepExtras
from ..kv_lengths.batch_state import LengthBatches
from ..kv_lengths.length_groups import BatchLaw
from ..machine_model import PoolShares
from ..requests import Floats, Int64s
from .prefix_cache import SimCache

NONE = -1
# Share of the KV kept free for requests that run longer than estimated.
KV_MARGIN = 0.01
# Output tokens that count as estimated correctly before any request has ended.
PRIOR = 32.0

# A request. There is one record per leaf.
REQUEST = np.dtype(
    [
        ("est_decode_steps_mean", np.float64),  # moments by the plan, before admission
        ("est_decode_steps_sq", np.float64),
        ("read_len", np.float64),  # prompt tokens read in each decode step, by the plan
        ("est_memory_s", np.float64),  # KV read time in kv_read_planned, in seconds
        ("begin", np.int64),  # step that completed its prompt, before its first decode
        ("est_decode_steps", np.int64),  # current estimate, in all
        ("bucket", np.int64),  # its entry in the KV forecast: bucket, base and final
        ("base", np.int64),
        ("final", np.int64),
        # Its step in the calendar, and its neighbours in that step.
        ("event", np.int64),
        ("before", np.int32),
        ("after", np.int32),
        ("older", np.int32),  # neighbours among running requests, by admission
        ("newer", np.int32),
        ("input_len", np.int32),
        ("decode_steps", np.int32),  # the truth, which only decides when it ends
        ("own", np.int32),  # prompt tokens that it shares with no other request
        ("node", np.int32),  # its parent in the prefix tree
        ("max_decode_steps", np.int32),
        ("generated", np.int32),  # decode steps before it was last retracted
        ("side", np.int32),
        ("admitted", np.int32),
        # As in SGLang: whether it was offloaded, whether its end is known in time to
        # leave it out of the next step, and the next follower of the same leader.
        ("offloaded", np.int32),
        ("ends_in_time", np.int32),
        ("next_follower", np.int32),
        # With batches of similar length: its length in them, and its family.
        ("key", np.int32),
        ("family", np.int32),
        ("more_reads", np.int32),  # of states and windows in a step, as tokens of KV
        ("pool_share", np.int32),  # units of the second pool that it is charged
        ("media", np.int32),  # placeholders of images and sounds in its prompt
        ("row_base", np.int64),  # length - step while it decodes
        ("position", np.int32),  # its place in the order, and how soon it is taken
        ("rank", np.int32),
    ],
    align=True,
)

# The whole engine, in one record.
STATE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "step",
            "clock",  # of the forecast: steps, in SGLang those with decodes
            "done",
            "running",
            "decoding",
            "private",  # KV of running requests, without shared prefixes, in tokens
            "read_base",  # sum over decoding requests of KV read, minus the step
            "shared_read",  # tokens of shared prefixes read, if they are read once
            "prefilled",
            "cached",
            "recomputed",
            "retractions",
            "peak_kv",
            "kv_steps",
            "next_left",
            "next_right",
            "admitted",
            "starting",
            "changes",  # requests that left, or whose estimate changed
            "newest",  # running request
            "idle",  # steps without anything to compute
            "held_back",  # followers held back in this step
            "followers_kv",  # KV tokens that all followers will need, without prefixes
            "ended",  # requests that ended and still hold their KV
            "first_offloaded",
            "num_offloaded",
            "longest",  # tokens that the longest row reads in this step
            "longest_joining",  # of the rows whose prompt is computed
            "heap_rows",  # entries of the heap of rows
            "num_notes",
            "cells_seen",  # ``changes`` when the rows of a dense engine were last sorted
            "pool_held",  # units of the second pool charged to running requests
            "cut",  # whether a prompt ends in this step where a state is kept
            "parked",  # rows that left in a switch of batches
            "media",  # placeholders of the prompts that join in this step
            "apart",  # steps whose prompts and decodes had steps of their own
            "prompts",  # requests of which a part of the prompt is computed in this step
            "after_prompts",  # prompts of the step before, if it ended with them
            "whole_tokens",  # prompts are computed up to so many tokens, beyond the budgets
            "ahead_tokens",  # prompt tokens that were computed beyond the budgets
        )
    ]
    + [
        (name, np.float64)
        for name in (
            "seconds",
            "pace",  # of the dual scanner
            "compute",
            "memory",
            "work",  # compute time by ``token_time_s``, as planned
            "context",  # of the prompts computed in this step, with their cached tokens
            "squares",  # of these
            "kv_read",  # memory time without weights
            "compute_planned",  # estimated times of the whole job
            "kv_read_planned",
            "margin",  # share of the KV that admission leaves free
            "est_total",  # sums of output tokens, estimated and true
            "true_total",
        )
    ],
    align=True,
)

# A side of the order, in two records.
SIDE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "kv",
            "decoding",
            "read_base",  # as for the whole engine
            "partial",  # request whose prompt is partly computed, and its missing tokens
            "partial_left",
            "num_retry",
            "retry_at",  # step at which to try again to admit the next request
            "changes_seen",
            "blocked",  # whether it stopped because KV was short
        )
    ],
    align=True,
)


# A place of the order, and of each list of requests by their stage. There is one per request.
PLACE = np.dtype(
    [
        ("density", np.float64),  # compute density of the order's neighbourhood
        ("leaf", np.int32),  # of the order
        ("admitted", np.int32),  # leaves in order of admission
        ("starting", np.int32),  # requests whose prompt was completed in this step
        ("ended", np.int32),  # requests that ended and still hold their KV
        ("offloaded", np.int32),  # a ring of offloaded requests, in this order
        ("retry", np.int32, 2),  # retracted requests of either side
        ("waits", np.int32),  # whether the order's request waits to be admitted
    ],
    align=True,
)


class Queue(NamedTuple):
    """The order of the plan, as leaves.

    dual, num_left: whether the order is taken from both ends, and positions of the left side.
    rule: of ``kv_lengths.batch_state``, 0 for an order that is followed.
    """

    dual: bool
    num_left: int
    rule: int


class RowHeap(NamedTuple):
    """Rows that decode, the longest at the top, and some that have left: int64 ``[3 n]``, a row's
    length minus the step, and the row."""

    bases: Int64s
    rows: Int64s


class RowLengths(NamedTuple):
    """The lengths of rows, where they matter to capacity or batches.

    Apart from :class:`Sim`, since numba's time to compile functions grows with their arrays. It
    does not compile what only takes place with them where there are none.

    cells: running rows of a dense engine.
    batches: waiting requests, and the batches that the others run in.
    law: by which the batches are chosen.
    """

    cells: PaddedForecast
    batches: LengthBatches
    law: BatchLaw


class SimEngine(NamedTuple):
    """Limits and costs of the engine: those of ``EngineLimits`` and ``CostModel``.
    ``kv_capacity`` is in whole pages, and ``mixing`` says when prompts and decodes have
    steps of their own."""

    kv_capacity: int
    page_size: int
    max_running: int
    step_tokens: int
    min_step_tokens: int
    closed_loop: bool
    as_sglang: bool
    shared_kv_read_once: bool
    token_time_s: float
    attention_time_s: float
    encoder_token_time_s: float
    kv_read_time_s: float
    weight_read_time_s: float
    interference_exponent: float
    split_exponent: float
    row_share: float
    padded: bool
    dense: bool
    second: PoolShares
    extras: StepExtras
    mixing: MixingCost


def as_record(values: Any) -> Any:
    """A tuple of fields as a record, which compiled functions pass to each other as one
    pointer. numba takes far longer to compile functions that are passed each field."""
    return np.array(values, _type_of(values))[()]


def _type_of(values: Any) -> Any:
    if hasattr(values, "_fields"):
        fields = [(name, _type_of(getattr(values, name))) for name in values._fields]
        return np.dtype(fields, align=True)
    if isinstance(values, tuple):
        return np.dtype((np.float64, len(values)))
    return np.dtype(type(values))


def make_state(num_requests: int) -> Any:
    """An engine at rest, before its first step."""
    state = np.zeros(1, STATE)
    state["step"] = state["clock"] = 1
    state["next_right"] = num_requests - 1
    state["pace"] = 1.0
    state["newest"] = NONE
    state["margin"] = KV_MARGIN
    state["est_total"] = state["true_total"] = PRIOR
    return state[0]


def make_sides() -> NDArray[Any]:
    sides = np.zeros(2, SIDE)
    sides["partial"] = NONE
    return sides


def make_calendar(max_decode_steps: int) -> NDArray[np.int32]:
    return np.full(1 << int(max_decode_steps + 2).bit_length(), NONE, np.int32)


class Sim(NamedTuple):
    """The whole state that a step of the simulator reads and changes.

    requests: ``REQUEST [n]`` by leaf.
    places: ``PLACE [n]``.
    calendar: int32 ``[slots]``, the first request with an event in each step.
    notes: int64 ``[8 n]``, see :func:`note`.
    growing: int64 ``[2, page_size]``, requests that decode, by side and by the steps
        (modulo the page size) that begin a page of them.
    engine: a record, see :func:`as_record`.
    table: float64 ``[6, t]``, ``CostModel.step_table``.
    state: a record of ``STATE``.
    sides: ``SIDE [2]``.
    """

    engine: SimEngine
    table: Floats
    queue: Queue
    requests: NDArray[Any]
    places: NDArray[Any]
    calendar: NDArray[np.int32]
    notes: Int64s
    growing: NDArray[np.int64]
    state: Any
    sides: NDArray[Any]
    cache: SimCache
    forecast: KvForecast


@jit_in_place
def in_pages(sim: Sim, tokens: int) -> int:
    """Tokens in the pages that hold ``tokens``."""
    page_size = sim.engine.page_size
    return int((tokens + page_size - 1) // page_size * page_size)


# Notes of changes to rows, for those who keep rows by their lengths.
#
# They are taken in one place before each step, so that the heap, the forecast and the batches of
# rows by length are not passed to all functions of the simulator.

DECODES, LEAVES, WAITS, COMES_BACK = 0, 1, 2, 3


@jit_in_place
def note(sim: Sim, i: int, kind: int) -> None:
    """Note that a row begins to decode, leaves, waits again, or comes back."""
    sim.notes[sim.state.num_notes] = 4 * i + kind
    sim.state.num_notes += 1


# The longest row that decodes.
#
# Every row grows by one token a step, so that ``length - step`` is constant while a row
# decodes. The largest of these is the top of a heap. Rows that have left are removed when they
# come to the top.


@jit_in_place
def _decodes(sim: Sim, heap: RowHeap, at: int) -> bool:
    """Whether an entry of the heap is of a row that still decodes."""
    r = sim.requests[heap.rows[at]]
    return bool(r.event != NONE and r.row_base == heap.bases[at])


@jit_in_place
def _push(sim: Sim, heap: RowHeap, base: int, row: int) -> None:
    bases, rows = heap.bases, heap.rows
    at = sim.state.heap_rows
    sim.state.heap_rows += 1
    while at > 0 and bases[(at - 1) // 2] < base:
        above = (at - 1) // 2
        bases[at], rows[at] = bases[above], rows[above]
        at = above
    bases[at], rows[at] = base, row


@jit_in_place
def _pop(sim: Sim, heap: RowHeap) -> None:
    bases, rows = heap.bases, heap.rows
    sim.state.heap_rows -= 1
    number = sim.state.heap_rows
    base, row = bases[number], rows[number]
    at = 0
    while 2 * at + 1 < number:
        child = 2 * at + 1
        if child + 1 < number and bases[child + 1] > bases[child]:
            child += 1
        if base >= bases[child]:
            break
        bases[at], rows[at] = bases[child], rows[child]
        at = child
    bases[at], rows[at] = base, row


@jit_in_place
def _push_row(sim: Sim, heap: RowHeap, row: int) -> None:
    state = sim.state
    if state.heap_rows == len(heap.bases):  # full of rows that have left
        entries, state.heap_rows = state.heap_rows, 0
        for at in range(entries):
            if _decodes(sim, heap, at):
                _push(sim, heap, heap.bases[at], heap.rows[at])
    _push(sim, heap, sim.requests[row].row_base, row)


@jit_in_place
def find_longest(sim: Sim, heap: RowHeap) -> None:
    """Take all notes, and set ``longest``: tokens that the longest row reads in this step, 0
    without rows."""
    state = sim.state
    for at in range(state.num_notes):
        if sim.notes[at] % 4 == DECODES:
            _push_row(sim, heap, sim.notes[at] // 4)
    state.num_notes = 0
    while state.heap_rows > 0 and not _decodes(sim, heap, 0):
        _pop(sim, heap)
    state.longest = 0
    if state.heap_rows > 0:
        state.longest = heap.bases[0] + state.step
