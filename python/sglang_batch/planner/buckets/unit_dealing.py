"""The units of a whole job dealt to the engines of a fleet, a million to a thousand.

Each engine gets one run of neighbours, as long as it needs for the time that all engines
need. So prefixes are computed again only at the ends of the runs. If the parts of the job
differ in density, runs of equal compute and memory time are slower than a mix of both.
Then the engines take turns, so that each has shorter runs from all over the job. Finally
the slowest engine gives single units to the fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...errors import ConfigError
from ..compiled import jit
from ..costs.cost_model import CostModel, overlapped
from ..requests import Floats, Int32s, Int64s
from ..sharding.speeds import ShardSpeeds
from .bucket_units import Units

# More runs are made only if the slowest engine takes longer than with the job's mix of
# work by more than this share, and kept only if it gets faster by more than this.
_TOLERANCE = 0.01
_ROUNDS = (1, 4, 16, 64)
# Engines whose times differ from the mean by less than this share are equal.
_EQUAL = 2e-3
# Engines that may take a unit: the fastest.
_NUM_TAKERS = 8
_MOST_PASSES = 4


@dataclass(frozen=True, slots=True)
class UnitDeal:
    """The engine of each unit, for ``k`` engines.

    engine: int32 ``[u]``, 0..k-1.
    seconds: float64 ``[k]``, estimated time of each engine. A prefix that several of its
        units share counts once. 0 for an engine that is not there.
    lost_tokens: prompt tokens computed in addition to those of one engine with all.
    """

    engine: Int32s
    seconds: Floats
    lost_tokens: int


class _Costs(NamedTuple):
    """Seconds of the units on the machine of the job's cost model, each float64 ``[u]``.

    compute: where nothing was computed before.
    saved: of that, the time of the tokens shared with the unit before.
    memory: memory time.
    """

    compute: Floats
    saved: Floats
    memory: Floats


def deal_units(units: Units, cost: CostModel, speeds: ShardSpeeds) -> UnitDeal:
    """Deal the units of a job so that all engines end together.

    No unit is divided. The time is about proportional to units and to engines: under ten
    seconds for a million of them and 1,000 engines.

    Args:
        units: of all buckets, as :func:`~.bucket_units.join_units` has them.
        speeds: of ``k`` engines, against the machine of ``cost``.

    Raises:
        ConfigError: no engine is there.
    """
    if not speeds.there.any():
        raise ConfigError(
            f"None of {len(speeds.compute)} engines is there; give one a speed."
        )
    shared_s = cost.prefill_time_s(units.shared_tokens, 0)
    costs = _Costs(units.compute_s, shared_s, units.memory_s)
    even_s = even_time_s(units, cost, speeds)
    best = None
    for rounds in _ROUNDS:
        engine = _runs(costs, speeds, cost, rounds, even_s)
        found = _eased(units, cost, costs, engine, speeds)
        slowest_s = found.seconds.max()
        if best is None or slowest_s < (1 - _TOLERANCE) * best.seconds.max():
            best = found
        if best.seconds.max() <= (1 + _TOLERANCE) * even_s:
            break
    assert best is not None
    return best


def even_time_s(units: Units, cost: CostModel, speeds: ShardSpeeds) -> float:
    """Seconds that the job takes if each engine has the same mix of work as the whole.

    No prefix is computed twice, and work can be divided anywhere.
    """
    shared_s = cost.prefill_time_s(units.shared_tokens, 0)
    there = speeds.there
    alone_s = cost.step_time_s(
        (units.compute_s - shared_s).sum() / speeds.compute[there],
        units.memory_s.sum() / speeds.memory[there],
    )
    return 1.0 / float((1.0 / alone_s).sum()) if alone_s.all() else 0.0


# --- Runs of neighbours.


def _runs(
    costs: _Costs,
    speeds: ShardSpeeds,
    cost: CostModel,
    rounds: int,
    even_s: float,
) -> Int32s:
    """The engine of each unit, int32 ``[u]``, if each has at most ``rounds`` runs."""
    if even_s == 0.0:  # The units take no time.
        first = int(np.flatnonzero(speeds.there)[0])
        return np.full(len(costs.memory), first, np.int32)
    compute, memory = (
        np.concatenate([np.zeros(1), np.cumsum(each)])
        for each in (costs.compute - costs.saved, costs.memory)
    )
    exponent = float(cost.interference_exponent)
    return _in_turns(
        compute, memory, costs.saved, speeds.compute, speeds.memory, exponent, rounds,
        even_s,
    )  # fmt: skip


@jit
def _in_turns(
    compute: Floats, memory: Floats, saved: Floats,
    compute_speed: Floats, memory_speed: Floats,
    exponent: float, rounds: int, even_s: float,
) -> Int32s:  # fmt: skip
    """Runs with the least time for all engines in which all units are dealt.

    Args:
        compute, memory: float64 ``[u + 1]``, of all units before one.
    """
    engine = np.empty(len(saved), np.int32)
    low, high = 0.0, even_s
    while True:
        dealt = _dealt_within(
            high, engine, compute, memory, saved, compute_speed, memory_speed, exponent,
            rounds,
        )  # fmt: skip
        if dealt:
            break
        low, high = high, 2.0 * high
    while high - low > 1e-4 * even_s:
        seconds = (low + high) / 2.0
        dealt = _dealt_within(
            seconds, engine, compute, memory, saved, compute_speed, memory_speed,
            exponent, rounds,
        )  # fmt: skip
        if dealt:
            high = seconds
        else:
            low = seconds
    _dealt_within(
        high, engine, compute, memory, saved, compute_speed, memory_speed, exponent,
        rounds,
    )  # fmt: skip
    return engine


@jit
def _dealt_within(
    seconds: float, engine: Int32s, compute: Floats, memory: Floats, saved: Floats,
    compute_speed: Floats, memory_speed: Floats, exponent: float, rounds: int,
) -> bool:  # fmt: skip
    """Whether all units are dealt if no engine takes more once it has so many seconds.

    Fills ``engine``. In each round an engine takes a run until it has its share of them.
    """
    u, k = len(saved), len(compute_speed)
    compute_s, memory_s = np.zeros(k), np.zeros(k)
    begin = 0
    for turn in range(rounds):
        least = seconds * (turn + 1) / rounds
        for e in range(k):
            if begin == u:
                return True
            if compute_speed[e] == 0.0 or (
                overlapped(compute_s[e], memory_s[e], exponent) >= least
            ):
                continue
            # The first end of the run with which the engine has enough, or the last end.
            low, end = begin + 1, u
            while low < end:
                middle = (low + end) // 2
                c = compute[middle] - compute[begin] + saved[begin]
                m = memory[middle] - memory[begin]
                c = compute_s[e] + c / compute_speed[e]
                m = memory_s[e] + m / memory_speed[e]
                if overlapped(c, m, exponent) >= least:
                    end = middle
                else:
                    low = middle + 1
            c = compute[end] - compute[begin] + saved[begin]
            compute_s[e] += c / compute_speed[e]
            memory_s[e] += (memory[end] - memory[begin]) / memory_speed[e]
            engine[begin:end] = e
            begin = end
    return begin == u


# --- Single units that move.


def _eased(
    units: Units,
    cost: CostModel,
    costs: _Costs,
    engine: Int32s,
    speeds: ShardSpeeds,
) -> UnitDeal:
    """The deal after moves from the slowest engine to the fastest, as long as they help."""
    best = None
    for _ in range(_MOST_PASSES):
        found, own = _measured(units, cost, costs, engine, speeds)
        if best is not None and found.seconds.max() >= best.seconds.max():
            break
        best = found
        engine = engine.copy()
        moved = _ease(
            engine, own, costs.compute, costs.memory, speeds.compute, speeds.memory,
            float(cost.interference_exponent),
        )  # fmt: skip
        if not moved:
            break
    assert best is not None
    return best


def _measured(
    units: Units,
    cost: CostModel,
    costs: _Costs,
    engine: Int32s,
    speeds: ShardSpeeds,
) -> tuple[UnitDeal, Floats]:
    """The deal with this engine for each unit, and the compute time of each, in seconds.

    That is without the tokens that a unit shares with the one before it on its engine.
    """
    k = len(speeds.compute)
    shared = shared_on_engines(units.shared_tokens, units.common_tokens, engine, k)
    # Rounding errors may make the difference negative.
    compute = np.maximum(costs.compute - cost.prefill_time_s(shared, 0), 0.0)
    # Nothing is dealt to an engine without a speed.
    seconds = cost.step_time_s(
        np.bincount(engine, compute, k) / np.where(speeds.there, speeds.compute, 1.0),
        np.bincount(engine, costs.memory, k)
        / np.where(speeds.there, speeds.memory, 1.0),
    )
    lost = units.shared_tokens.sum(dtype=np.int64) - shared.sum(dtype=np.int64)
    return UnitDeal(engine, seconds, int(lost)), compute


@jit
def shared_on_engines(
    shared_tokens: Int32s, common_tokens: Int32s, engine: Int32s, k: int
) -> Int32s:
    """Tokens that each unit shares with the one before it on its engine, int32 ``[u]``.

    Args:
        shared_tokens, common_tokens: int32 ``[u]``, as of the units of the whole job.
        engine: int32 ``[u]``, 0 to ``k - 1``.
    """
    shared = np.empty_like(shared_tokens)
    # Tokens that the next unit shares with the last one of each engine.
    common = np.zeros(k, np.int32)
    for unit in range(len(shared_tokens)):
        own = engine[unit]
        shared[unit] = min(common[own], shared_tokens[unit])
        passed = min(shared_tokens[unit], common_tokens[unit])
        for e in range(k):
            common[e] = min(common[e], passed)
        common[own] = np.iinfo(np.int32).max
    return shared


@jit
def _ease(
    engine: Int32s, own: Floats, compute: Floats, memory: Floats,
    compute_speed: Floats, memory_speed: Floats, exponent: float,
) -> bool:  # fmt: skip
    """Move units from the slowest engine to fast ones, in place, while that helps.

    Each move takes the unit and the engine that make the slower of the two fastest. Times
    are upper bounds for the taker, which may have some of the unit's prefix, and lower
    bounds for the giver, as the unit's successor may have shared some with it.

    Args:
        own: float64 ``[u]``, compute time of each unit on its engine, in seconds on the
            machine of the job's cost model. ``compute`` is that on any other.

    Returns:
        Whether a unit was moved.
    """
    k = len(compute_speed)
    compute_s, memory_s, seconds = np.zeros(k), np.zeros(k), np.zeros(k)
    for unit in range(len(engine)):
        e = engine[unit]
        compute_s[e] += own[unit] / compute_speed[e]
        memory_s[e] += memory[unit] / memory_speed[e]
    num_there = 0
    for e in range(k):
        seconds[e] = overlapped(compute_s[e], memory_s[e], exponent)
        num_there += compute_speed[e] > 0.0
    # The units that each engine has at first. What has moved does not move on.
    units = np.argsort(engine, kind="mergesort")
    begin = np.searchsorted(engine[units], np.arange(k + 1))
    takers = np.empty(_NUM_TAKERS, np.int64)
    moved = False
    for _ in range(len(engine)):
        giver = int(np.argmax(seconds))
        if seconds[giver] <= (1.0 + _EQUAL) * seconds.sum() / num_there:
            break
        num_takers = _fastest(seconds, compute_speed, takers)
        least = seconds[giver] * (1.0 - 1e-9)
        best, to = -1, -1
        for unit in units[begin[giver] : begin[giver + 1]]:
            if engine[unit] != giver:
                continue
            left = overlapped(
                max(0.0, compute_s[giver] - own[unit] / compute_speed[giver]),
                max(0.0, memory_s[giver] - memory[unit] / memory_speed[giver]),
                exponent,
            )
            if left >= least:
                continue
            for e in takers[:num_takers]:
                there = overlapped(
                    compute_s[e] + compute[unit] / compute_speed[e],
                    memory_s[e] + memory[unit] / memory_speed[e],
                    exponent,
                )
                if e != giver and max(left, there) < least:
                    best, to, least = unit, e, max(left, there)
        if best < 0:
            break
        compute_s[giver] -= own[best] / compute_speed[giver]
        memory_s[giver] -= memory[best] / memory_speed[giver]
        compute_s[to] += compute[best] / compute_speed[to]
        memory_s[to] += memory[best] / memory_speed[to]
        for e in (giver, to):
            compute_s[e], memory_s[e] = max(0.0, compute_s[e]), max(0.0, memory_s[e])
            seconds[e] = overlapped(compute_s[e], memory_s[e], exponent)
        engine[best] = to
        moved = True
    return moved


@jit
def _fastest(seconds: Floats, compute_speed: Floats, takers: Int64s) -> int:
    """Fill ``takers`` with the engines of least time, and return their number."""
    num_takers = 0
    for e in range(len(seconds)):
        if compute_speed[e] == 0.0:
            continue
        at = num_takers
        while at > 0 and seconds[takers[at - 1]] > seconds[e]:
            if at < len(takers):
                takers[at] = takers[at - 1]
            at -= 1
        if at < len(takers):
            takers[at] = e
            num_takers = min(num_takers + 1, len(takers))
    return num_takers
