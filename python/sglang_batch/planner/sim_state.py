"""The simulator's state, as records that compiled code changes in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .kv_forecast import KvForecast
from .requests import Floats, Int64s
from .sim_cache import SimCache

LEFT, RIGHT = 0, 1
NONE = -1
# Share of the KV kept free for requests that outlive their estimates.
KV_MARGIN = 0.01
# So many estimates count as right before anything was observed.
PRIOR = 32.0

# One request. What is known beforehand comes first.
REQUEST = np.dtype(
    [
        ("estimate_mean", np.float64),
        ("estimate_sq", np.float64),
        ("read_len", np.float64),  # prompt tokens it reads in each step, by the plan
        ("memory_estimate", np.float64),  # seconds of KV reads it is counted with
        ("begin", np.int64),  # step of its prefill; it decodes from the next on
        ("estimate", np.int64),  # present estimate of its output length
        ("bucket", np.int64),  # its place in the KV forecast: bucket, base and final
        ("base", np.int64),
        ("final", np.int64),
        ("event", np.int64),  # its step in the calendar, and its neighbours there
        ("before", np.int32),
        ("after", np.int32),
        ("older", np.int32),  # neighbours among the running, by admission
        ("newer", np.int32),
        ("input_len", np.int32),
        ("output_len", np.int32),  # the truth: only its end is decided by it
        ("own", np.int32),  # prompt tokens that no other request has
        ("node", np.int32),  # the tree's node it hangs from
        ("max_new_tokens", np.int32),
        ("generated", np.int32),  # before it was last retracted
        ("side", np.int32),
        ("admitted", np.int32),
        # As in SGLang: whether it was parked, whether its end is known in time to
        # leave it out of the next step, and who follows the same leader.
        ("parked", np.int32),
        ("ends_in_time", np.int32),
        ("next_follower", np.int32),
    ],
    align=True,
)

# The whole engine; one record.
STATE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "step",
            "clock",  # of the forecast: steps; in SGLang those with decodes
            "done",
            "running",
            "decoding",
            "private",  # KV tokens of running requests, without shared prefixes
            "read_base",  # sum over decoding requests of KV read, minus the step
            "shared_read",  # tokens of shared prefixes read, where they are read once
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
            "idle",  # steps in which there was nothing to compute
            "set_aside",  # followers set aside in this step
            "followers_kv",  # tokens of KV that all followers will need, shared aside
            "ended",  # requests that ended and still hold their KV
            "first_parked",
            "num_parked",
        )
    ]
    + [
        (name, np.float64)
        for name in (
            "seconds",
            "pace",  # of the dual scanner
            "compute",
            "memory",
            "kv_read",  # the part of memory that is not weights
            "compute_planned",  # of the whole job, by the estimates
            "kv_read_planned",
            "margin",  # share of the KV that admission leaves free
            "estimated",  # sums of estimates, and of what came of them
            "came_out",
        )
    ],
    align=True,
)

# Of one side; two records.
SIDE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "kv",
            "decoding",
            "read_base",  # as that of the whole engine
            "partial",  # request whose prompt is being computed, and what it needs
            "partial_left",
            "num_retry",
            "retry_at",  # the next request does not fit: when to try again
            "changes_seen",
            "blocked",  # whether it had to stop for want of KV
        )
    ],
    align=True,
)


class Queue(NamedTuple):
    """The plan: int64 ``order[place]`` is a leaf, ``rank[leaf]`` how soon it comes.

    place: int64 by leaf.

    density: float64 by place. dual: whether it is taken from both ends.
    num_left: places of the left side; the right scanner stops before them.
    """

    order: Int64s
    place: Int64s
    rank: Int64s
    density: Floats
    dual: bool
    num_left: int


class Engine(NamedTuple):
    """What the engine can do and how long it takes.

    step_tokens: most tokens in a step, of prompts and decodes together.
    min_step_tokens: prompt tokens that the dual scanner may compute in a step whatever
        the density, to get the right side going.
    batch_multiple: tokens of a step are a multiple of this, as far as prompts allow,
        and a step is charged for a whole multiple.
    closed_loop: whether the dual scanner's prefill budget follows what a step needs.
    as_sglang: see ``simulator.EngineLimits``.
    """

    kv_capacity: int
    max_running: int
    step_tokens: int
    min_step_tokens: int
    batch_multiple: int
    closed_loop: bool
    as_sglang: bool
    shared_kv_read_once: bool
    token_time_s: float
    attention_time_s: float
    kv_read_time_s: float
    weight_read_time_s: float
    interference_exponent: float


class Lists(NamedTuple):
    """Requests by what happens to them.

    calendar: int32 ``[slots]``, the first request whose event is in a step.
    starting: int32 ``[n]``, requests whose prompt was completed in this step.
    retry: int32 ``[2, n]``, retracted requests of either side.
    admitted: int64 ``[n]``, leaves in order of admission.
    waiting: uint8 by place, whether the request waits for its turn.
    ended: int32 ``[n]``, requests that ended and still hold their KV.
    parked: int32 ``[n]``, a ring of those parked, in that order.
    """

    calendar: NDArray[np.int32]
    starting: NDArray[np.int32]
    retry: NDArray[np.int32]
    admitted: Int64s
    waiting: NDArray[np.uint8]
    ended: NDArray[np.int32]
    parked: NDArray[np.int32]


def make_state(num_requests: int) -> NDArray[Any]:
    """An engine at rest, before its first step."""
    state = np.zeros(1, STATE)
    state["step"] = state["clock"] = 1
    state["next_right"] = num_requests - 1
    state["pace"] = 1.0
    state["newest"] = NONE
    state["margin"] = KV_MARGIN
    state["estimated"] = state["came_out"] = PRIOR
    return state


def make_sides() -> NDArray[Any]:
    sides = np.zeros(2, SIDE)
    sides["partial"] = NONE
    return sides


def make_lists(num_requests: int, max_output_len: int) -> Lists:
    slots = 1 << int(max_output_len + 2).bit_length()
    return Lists(
        calendar=np.full(slots, NONE, np.int32),
        starting=np.zeros(num_requests, np.int32),
        retry=np.zeros((2, num_requests), np.int32),
        admitted=np.zeros(num_requests, np.int64),
        waiting=np.ones(num_requests, np.uint8),
        ended=np.zeros(num_requests, np.int32),
        parked=np.zeros(num_requests, np.int32),
    )


class Sim(NamedTuple):
    """All that a step of the simulator works on.

    requests: ``REQUEST [n]`` by leaf; state: ``STATE [1]``; sides: ``SIDE [2]``.
    """

    engine: Engine
    queue: Queue
    requests: NDArray[Any]
    state: NDArray[Any]
    sides: NDArray[Any]
    lists: Lists
    cache: SimCache
    forecast: KvForecast
