"""The steps of the simulator, compiled.

Leaves of the prefix tree stand for requests here. Time moves in steps; what happens to
a request later (it ends, or outlives its estimate) is kept in a calendar of steps, so a
step costs what changes in it and not the number of running requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import kv_forecast as kv
from . import sim_cache as prefix
from .cost_model import overlapped
from .dual_scanner import ScanState, budgets
from .jit import jit
from .kv_forecast import KvForecast
from .requests import Floats, Int32s, Int64s
from .sim_cache import LOCKED, SimCache

LEFT, RIGHT = 0, 1
_NONE = -1
# While a target density is out of reach this many times over, nothing is gained by
# more of it.
_DENSITY_RANGE = 1e6
# The remaining work is summed up anew after so many steps.
_RETARGET_STEPS = 64
# A request that did not fit is tried again when something ended, or after this many
# steps, for what it is weighed against moves slowly with the budgets.
_RETRY_STEPS = 32
# KV kept free for requests that outlive their estimates.
_KV_MARGIN = 0.01
# Share by which a step may exceed its target where nothing on the right needs company.
_RAMP = 1.5


class Work(NamedTuple):
    """The requests, by leaf: int32 ``[n]`` unless said otherwise.

    estimate, estimate_sq: float64 ``[n]``, first and second moment of the output length.
    output_len: the true length, used only to know when a request ends.
    """

    input_len: Int32s
    output_len: Int32s
    leaf_parent: Int32s
    max_new_tokens: Int32s
    estimate: Floats
    estimate_sq: Floats


class Queue(NamedTuple):
    """The plan: int64 ``order[rank]`` is a leaf; float64 ``density[rank]``.

    dual: whether it is taken from both ends.
    """

    order: Int64s
    rank: Int64s
    density: Floats
    dual: bool


class Engine(NamedTuple):
    """What the engine can do and how long it takes.

    step_tokens: most tokens in a step, of prompts and decodes together.
    min_step_tokens: prompt tokens that the dual scanner may compute in a step whatever
        the density, to get the right side going.
    batch_multiple: tokens of a step are a multiple of this, as far as prompts allow,
        and a step is charged for a whole multiple.
    """

    kv_capacity: int
    max_running: int
    step_tokens: int
    min_step_tokens: int
    batch_multiple: int
    shared_kv_read_once: bool
    token_time_s: float
    attention_time_s: float
    kv_read_time_s: float
    weight_read_time_s: float
    interference_exponent: float


# Counters ---------------------------------------------------------------------------
(
    STEP, DONE, RUNNING, DECODING, PRIVATE, READ_BASE, PREFILLED, CACHED, RECOMPUTED,
    RETRACTIONS, PEAK_KV, NEXT_LEFT, NEXT_RIGHT, ADMITTED, STARTING,
    DECODED, KV_STEPS, CHANGES, NUM_COUNTERS,
) = range(19)  # fmt: skip
# Sums in seconds ----------------------------------------------------------------------
MAKESPAN, COMPUTE, MEMORY, COMPUTE_LEFT, MEMORY_LEFT, NUM_SUMS = range(6)


class Requests(NamedTuple):
    """What is known of each request while it runs, by leaf.

    generated: tokens generated before it was last retracted.
    begin: step of its prefill; it decodes from the next step on.
    estimate: its present estimate, in tokens.
    memory_estimate: seconds of KV reads that the estimate stands for.
    bucket, base, final: its place in the KV forecast.
    event, before, after: its step in the calendar and its neighbours in that step.
    older, newer: running requests in order of admission; the last entry is the head.
    """

    generated: Int32s
    begin: Int64s
    estimate: Int64s
    memory_estimate: Floats
    bucket: Int64s
    base: Int64s
    final: Int64s
    event: Int64s
    before: Int32s
    after: Int32s
    older: Int32s
    newer: Int32s
    side: NDArray[np.int8]
    admitted: NDArray[np.uint8]
    admitted_order: Int64s


class Live(NamedTuple):
    """State of the engine between steps.

    calendar: int32 ``[slots]``, first request of each step's list.
    partial: int64 ``[2]``, the request of either side whose prompt is being computed;
        partial_left: prompt tokens it still needs.
    side_kv, side_decoding: int64 ``[2]``.
    retry_at, changes_seen: int64 ``[2]``, see ``_waits``.
    starting: int32 ``[n]``, requests whose prompt was completed in this step.
    retry: int32 ``[2, n]`` and num_retry int64 ``[2]``, retracted requests.
    node_readers: int32 ``[m]``, decoding requests below a node.
    shared_read: int64 ``[1]``, tokens of the nodes that decoding requests read.
    """

    calendar: Int32s
    retry_at: Int64s
    changes_seen: Int64s
    partial: Int64s
    partial_left: Int64s
    side_kv: Int64s
    side_decoding: Int64s
    starting: Int32s
    retry: NDArray[np.int32]
    num_retry: Int64s
    node_readers: Int32s
    shared_read: Int64s
    counters: Int64s
    sums: Floats


def make_state(
    num_requests: int, num_nodes: int, max_output_len: int
) -> tuple[Requests, Live]:
    """Empty state for a job."""
    n = num_requests
    slots = 1 << int(max_output_len + 2).bit_length()

    def zeros(size: int, dtype: type) -> NDArray[np.generic]:
        return np.zeros(size, dtype=dtype)

    head = np.full(n + 1, n, dtype=np.int32)
    requests = Requests(
        generated=np.zeros(n, np.int32),
        begin=np.zeros(n, np.int64),
        estimate=np.zeros(n, np.int64),
        memory_estimate=np.zeros(n, np.float64),
        bucket=np.zeros(n, np.int64),
        base=np.zeros(n, np.int64),
        final=np.zeros(n, np.int64),
        event=np.full(n, _NONE, np.int64),
        before=np.full(n, _NONE, np.int32),
        after=np.full(n, _NONE, np.int32),
        older=head.copy(),
        newer=head.copy(),
        side=np.zeros(n, np.int8),
        admitted=np.zeros(n, np.uint8),
        admitted_order=np.zeros(n, np.int64),
    )
    live = Live(
        calendar=np.full(slots, _NONE, np.int32),
        retry_at=np.zeros(2, np.int64),
        changes_seen=np.zeros(2, np.int64),
        partial=np.full(2, _NONE, np.int64),
        partial_left=np.zeros(2, np.int64),
        side_kv=np.zeros(2, np.int64),
        side_decoding=np.zeros(2, np.int64),
        starting=np.zeros(n, np.int32),
        retry=np.zeros((2, n), np.int32),
        num_retry=np.zeros(2, np.int64),
        node_readers=np.zeros(num_nodes, np.int32),
        shared_read=np.zeros(1, np.int64),
        counters=np.zeros(NUM_COUNTERS, np.int64),
        sums=np.zeros(NUM_SUMS, np.float64),
    )
    return requests, live


# The calendar -------------------------------------------------------------------------


@jit
def _schedule(requests: Requests, live: Live, i: int, step: int) -> None:
    slot = step & (len(live.calendar) - 1)
    first = live.calendar[slot]
    requests.event[i] = step
    requests.before[i] = _NONE
    requests.after[i] = first
    if first != _NONE:
        requests.before[first] = i
    live.calendar[slot] = i


@jit
def _unschedule(requests: Requests, live: Live, i: int) -> None:
    before, after = requests.before[i], requests.after[i]
    if before == _NONE:
        live.calendar[requests.event[i] & (len(live.calendar) - 1)] = after
    else:
        requests.after[before] = after
    if after != _NONE:
        requests.before[after] = before
    requests.event[i] = _NONE


@jit
def _schedule_next(work: Work, requests: Requests, live: Live, i: int) -> None:
    """The end of a request, or the step at which it has outlived its estimate."""
    end = min(int(work.output_len[i]), requests.estimate[i])
    _schedule(requests, live, i, requests.begin[i] + end - requests.generated[i])


# A request's way through the engine ---------------------------------------------------


@jit
def whole_estimate(tokens: float) -> int:
    """An estimated output length as the whole number that admission counts with."""
    return max(1, int(tokens + 0.5))


@jit
def _own_tokens(work: Work, cache: SimCache, i: int) -> int:
    return int(work.input_len[i] - cache.depth[work.leaf_parent[i]])


@jit
def _join_forecast(
    work: Work, forecast: KvForecast, cache: SimCache, requests: Requests, live: Live,
    i: int, generated: int,
) -> None:  # fmt: skip
    now = live.counters[STEP]
    held = _own_tokens(work, cache, i) + generated
    remaining = max(requests.estimate[i] - generated, 1)
    requests.base[i] = held - now
    requests.final[i] = held + remaining
    requests.bucket[i] = kv.add(forecast, now, held, remaining)


@jit
def _leave_forecast(
    forecast: KvForecast, requests: Requests, live: Live, i: int
) -> None:
    live.counters[CHANGES] += 1
    kv.remove(forecast, requests.bucket[i], requests.base[i], requests.final[i])


@jit
def _fits(
    work: Work, engine: Engine, cache: SimCache, forecast: KvForecast,
    requests: Requests, live: Live, i: int, reserved: int,
) -> bool:  # fmt: skip
    """Whether a request can join, now and by the forecast."""
    counters = live.counters
    if counters[RUNNING] >= engine.max_running:
        return False
    if counters[RUNNING] == 0:
        return True
    held = _own_tokens(work, cache, i) + requests.generated[i]
    locked = cache.totals[LOCKED] + prefix.newly_locked(cache, work.leaf_parent[i])
    if counters[PRIVATE] + held + locked + counters[DECODING] > engine.kv_capacity:
        return False
    remaining = max(whole_estimate(work.estimate[i]) - requests.generated[i], 1)
    peak = kv.peak(forecast, counters[STEP], held, remaining) + locked
    return bool(peak + reserved <= engine.kv_capacity * (1.0 - _KV_MARGIN))


@jit
def _make_room(
    engine: Engine, cache: SimCache, queue: Queue, requests: Requests, live: Live
) -> None:
    """Evict until what is in use fits; the locked part always does."""
    used = cache.totals.sum() + live.counters[PRIVATE]
    if used > engine.kv_capacity:
        prefix.evict(cache, used - engine.kv_capacity, queue.rank, requests.admitted)


@jit
def _admit(
    work: Work, engine: Engine, queue: Queue, cache: SimCache, forecast: KvForecast,
    requests: Requests, live: Live, i: int, side: int,
) -> None:  # fmt: skip
    counters = live.counters
    node = work.leaf_parent[i]
    cached = prefix.cached_depth(cache, node)
    own = _own_tokens(work, cache, i) + requests.generated[i]
    total = work.input_len[i] + requests.generated[i]
    first = requests.admitted[i] == 0
    prefix.lock(cache, node, first)
    counters[PRIVATE] += own
    live.side_kv[side] += own
    _make_room(engine, cache, queue, requests, live)
    extend = total - cached
    if extend == 0:  # the last prompt token is always computed, for its logits
        extend = 1
        counters[RECOMPUTED] += 1
    if first:
        requests.admitted[i] = 1
        requests.admitted_order[counters[ADMITTED]] = i
        counters[ADMITTED] += 1
        counters[CACHED] += cached
        requests.estimate[i] = whole_estimate(work.estimate[i])
        requests.memory_estimate[i] = engine.kv_read_time_s * (
            work.input_len[i] * work.estimate[i] + work.estimate_sq[i] / 2.0
        )
    else:
        counters[RECOMPUTED] += extend
    requests.side[i] = side
    _join_forecast(work, forecast, cache, requests, live, i, int(requests.generated[i]))
    head = len(requests.older) - 1
    newest = requests.older[head]
    requests.newer[newest] = i
    requests.older[i] = newest
    requests.newer[i] = head
    requests.older[head] = i
    counters[RUNNING] += 1
    live.partial[side] = i
    live.partial_left[side] = extend


@jit
def _leave(requests: Requests, live: Live, i: int) -> None:
    older, newer = requests.older[i], requests.newer[i]
    requests.newer[older] = newer
    requests.older[newer] = older
    live.counters[RUNNING] -= 1


@jit
def _read_nodes(cache: SimCache, live: Live, node: int, change: int) -> None:
    while node > 0:
        if live.node_readers[node] == 0:
            live.shared_read[0] += cache.length[node]
        live.node_readers[node] += change
        if live.node_readers[node] == 0:
            live.shared_read[0] -= cache.length[node]
        node = cache.parent[node]


@jit
def _start_decoding(
    work: Work, engine: Engine, cache: SimCache, requests: Requests, live: Live
) -> None:
    """Requests whose prompt this step completed decode from the next one on."""
    counters = live.counters
    for j in range(counters[STARTING]):
        i = live.starting[j]
        requests.begin[i] = counters[STEP]
        counters[DECODING] += 1
        live.side_decoding[requests.side[i]] += 1
        counters[READ_BASE] += (
            work.input_len[i] + requests.generated[i] - counters[STEP]
        )
        if engine.shared_kv_read_once:
            node = work.leaf_parent[i]
            counters[READ_BASE] -= cache.depth[node]
            _read_nodes(cache, live, node, 1)
        _schedule_next(work, requests, live, i)
    counters[STARTING] = 0


@jit
def _stop_decoding(
    work: Work, engine: Engine, cache: SimCache, requests: Requests, live: Live, i: int
) -> int:
    """Take a request out of the batch; returns the tokens it has generated."""
    counters = live.counters
    generated = int(requests.generated[i] + counters[STEP] - requests.begin[i])
    counters[DECODING] -= 1
    live.side_decoding[requests.side[i]] -= 1
    counters[READ_BASE] -= work.input_len[i] + requests.generated[i] - requests.begin[i]
    if engine.shared_kv_read_once:
        node = work.leaf_parent[i]
        counters[READ_BASE] += cache.depth[node]
        _read_nodes(cache, live, node, -1)
    private = _own_tokens(work, cache, i) + generated
    counters[PRIVATE] -= private
    live.side_kv[requests.side[i]] -= private
    prefix.unlock(cache, work.leaf_parent[i])
    _leave(requests, live, i)
    return generated


@jit
def _retract_newest(
    work: Work, engine: Engine, cache: SimCache, forecast: KvForecast,
    requests: Requests, live: Live,
) -> bool:  # fmt: skip
    """Give back the KV of the request that decodes for the shortest time."""
    head = len(requests.older) - 1
    i = requests.older[head]
    while i != head and requests.event[i] == _NONE:  # prompts being computed stay
        i = requests.older[i]
    if i == head:
        return False
    _unschedule(requests, live, i)
    _leave_forecast(forecast, requests, live, i)
    # The token of this step was not generated yet.
    live.counters[STEP] -= 1
    requests.generated[i] = _stop_decoding(work, engine, cache, requests, live, i)
    live.counters[STEP] += 1
    side = requests.side[i]
    live.retry[side, live.num_retry[side]] = i
    live.num_retry[side] += 1
    live.counters[RETRACTIONS] += 1
    return True


@jit
def _revise_estimate(
    work: Work, engine: Engine, forecast: KvForecast, cache: SimCache,
    requests: Requests, live: Live, i: int, new: int,
) -> None:  # fmt: skip
    """A request turned out to be longer, or ended: the remaining work changes."""
    memory = engine.kv_read_time_s * (
        float(work.input_len[i]) * new + float(new) * (new + 1.0) / 2.0
    )
    live.sums[COMPUTE_LEFT] += (new - requests.estimate[i]) * engine.token_time_s
    live.sums[MEMORY_LEFT] += memory - requests.memory_estimate[i]
    requests.estimate[i] = new
    requests.memory_estimate[i] = memory


@jit
def _end_of_step(
    work: Work, engine: Engine, cache: SimCache, forecast: KvForecast,
    requests: Requests, live: Live,
) -> None:  # fmt: skip
    """Requests whose event falls on this step end, or get a longer estimate."""
    counters = live.counters
    slot = counters[STEP] & (len(live.calendar) - 1)
    i = live.calendar[slot]
    while i != _NONE:
        following = requests.after[i]
        _unschedule(requests, live, i)
        _leave_forecast(forecast, requests, live, i)
        generated = int(requests.generated[i] + counters[STEP] - requests.begin[i])
        if generated >= work.output_len[i]:
            _revise_estimate(
                work, engine, forecast, cache, requests, live, i, generated
            )
            _stop_decoding(work, engine, cache, requests, live, i)
            prefix.leave_garbage(cache, i, _own_tokens(work, cache, i) + generated)
            counters[DONE] += 1
        else:
            longer = min(generated + generated // 2 + 16, int(work.max_new_tokens[i]))
            longer = max(longer, generated + 1)
            _revise_estimate(work, engine, forecast, cache, requests, live, i, longer)
            _join_forecast(work, forecast, cache, requests, live, i, generated)
            _schedule_next(work, requests, live, i)
        i = following


# Admission ----------------------------------------------------------------------------


@jit
def _candidate(queue: Queue, requests: Requests, live: Live, side: int) -> int:
    """The request next in turn on a side; -1 where there is none."""
    if live.num_retry[side] > 0:
        return int(live.retry[side, live.num_retry[side] - 1])
    counters = live.counters
    if counters[NEXT_LEFT] > counters[NEXT_RIGHT]:
        return _NONE
    return int(queue.order[counters[NEXT_LEFT if side == LEFT else NEXT_RIGHT]])


@jit
def _take(live: Live, side: int) -> None:
    if live.num_retry[side] > 0:
        live.num_retry[side] -= 1
    elif side == LEFT:
        live.counters[NEXT_LEFT] += 1
    else:
        live.counters[NEXT_RIGHT] -= 1


@jit
def _waits(live: Live, side: int) -> bool:
    """Whether this side's next request was found not to fit, and nothing changed."""
    counters = live.counters
    if (
        counters[STEP] < live.retry_at[side]
        and counters[CHANGES] == live.changes_seen[side]
        and counters[RUNNING] > 0
    ):
        return True
    live.retry_at[side] = counters[STEP] + _RETRY_STEPS
    live.changes_seen[side] = counters[CHANGES]
    return False


@jit
def _prefill(
    work: Work, engine: Engine, queue: Queue, cache: SimCache, forecast: KvForecast,
    requests: Requests, live: Live, side: int, tokens: int, reserved: int,
) -> tuple[int, float]:  # fmt: skip
    """Compute up to ``tokens`` prompt tokens of a side, admitting as needed.

    Returns:
        Tokens computed, and seconds of attention over them.
    """
    counters = live.counters
    done = 0
    attention = 0.0
    while done < tokens:
        if live.partial[side] == _NONE:
            i = _candidate(queue, requests, live, side)
            if i == _NONE:
                break
            if _waits(live, side) or not _fits(
                work, engine, cache, forecast, requests, live, i, reserved
            ):
                break
            live.retry_at[side] = 0
            _take(live, side)
            _admit(work, engine, queue, cache, forecast, requests, live, i, side)
        i = live.partial[side]
        take = min(live.partial_left[side], tokens - done)
        if engine.attention_time_s > 0.0:
            end = work.input_len[i] + requests.generated[i] - live.partial_left[side]
            attention += engine.attention_time_s * (
                (float(end) + take) ** 2 - float(end) ** 2
            )
        done += take
        live.partial_left[side] -= take
        if live.partial_left[side] == 0:
            live.starting[counters[STARTING]] = i
            counters[STARTING] += 1
            live.partial[side] = _NONE
    counters[PREFILLED] += done
    return done, attention


@jit
def _memory_time(engine: Engine, live: Live) -> float:
    """Seconds to read weights and the KV of all that decode in this step."""
    counters = live.counters
    tokens = counters[READ_BASE] + counters[DECODING] * counters[STEP]
    tokens += live.shared_read[0]
    return float(engine.weight_read_time_s + tokens * engine.kv_read_time_s)


@jit
def _density_ahead(queue: Queue, live: Live, side: int) -> float:
    rank = live.counters[NEXT_LEFT if side == LEFT else NEXT_RIGHT]
    return float(queue.density[min(max(rank, 0), len(queue.density) - 1)])


@jit
def _dual_prefill(
    work: Work, engine: Engine, queue: Queue, cache: SimCache, forecast: KvForecast,
    requests: Requests, live: Live, target: float,
) -> tuple[int, float]:  # fmt: skip
    """Admit from both sides by the dual scanner's budgets."""
    counters = live.counters
    right_open = _candidate(queue, requests, live, RIGHT) != _NONE
    allowed = budgets(
        ScanState(
            kv_capacity=engine.kv_capacity,
            left_density=_density_ahead(queue, live, LEFT),
            right_density=_density_ahead(queue, live, RIGHT),
            left_open=_candidate(queue, requests, live, LEFT) != _NONE,
            right_open=right_open,
            target_density=target,
            decode_tokens=int(counters[DECODING]),
            memory_time_s=_memory_time(engine, live),
            token_time_s=engine.token_time_s,
        )
    )
    limit = max(0, engine.step_tokens - counters[DECODING])
    tokens = allowed.prefill_tokens
    right = min(limit, max(tokens, engine.min_step_tokens))
    done, attention = 0, 0.0
    if allowed.right_kv > 0:
        kept = max(0, allowed.left_kv - live.side_kv[LEFT])
        done, attention = _prefill(
            work, engine, queue, cache, forecast, requests, live, RIGHT,
            _whole(engine, live, right), kept,
        )  # fmt: skip
    if live.side_decoding[RIGHT] == 0 and done == 0:
        tokens = max(int(tokens * _RAMP), engine.min_step_tokens)
    tokens = min(limit, tokens) - done
    if tokens > 0:
        more, over = _prefill(
            work, engine, queue, cache, forecast, requests, live, LEFT,
            _whole(engine, live, tokens), 0,
        )  # fmt: skip
        done += more
        attention += over
    return done, attention


@jit
def _whole(engine: Engine, live: Live, tokens: int) -> int:
    """``tokens``, such that with the decodes they make a multiple if they can."""
    excess = (tokens + live.counters[DECODING]) % engine.batch_multiple
    return tokens - excess if excess < tokens else tokens


@jit
def run_steps(
    work: Work, engine: Engine, queue: Queue, cache: SimCache, forecast: KvForecast,
    requests: Requests, live: Live, samples: Floats,
) -> int:  # fmt: skip
    """Run the job to its end.

    Args:
        samples: float64 ``[3, s]``, filled with the seconds, the compute and the memory
            time of the job's steps, ``stride`` steps to a column.

    Returns:
        The stride.
    """
    n = len(work.input_len)
    counters, sums = live.counters, live.sums
    counters[NEXT_RIGHT] = n - 1
    counters[STEP] = 1
    stride = 1
    target = 1.0
    while counters[DONE] < n:
        if counters[STEP] % _RETARGET_STEPS == 1:
            left = max(sums[MEMORY_LEFT] - sums[MEMORY], 1e-9)
            target = max(sums[COMPUTE_LEFT] - sums[COMPUTE], 0.0) / left
            target = min(max(target, 1.0 / _DENSITY_RANGE), _DENSITY_RANGE)
        if queue.dual:
            tokens, attention = _dual_prefill(
                work, engine, queue, cache, forecast, requests, live, target
            )
        else:
            tokens, attention = _prefill(
                work, engine, queue, cache, forecast, requests, live, LEFT,
                _whole(engine, live, max(0, engine.step_tokens - counters[DECODING])),
                0,
            )  # fmt: skip
        while (
            counters[PRIVATE] + counters[DECODING] + cache.totals[LOCKED]
            > engine.kv_capacity
        ):
            if not _retract_newest(work, engine, cache, forecast, requests, live):
                break
        counters[PRIVATE] += counters[DECODING]
        for side in range(2):
            live.side_kv[side] += live.side_decoding[side]
        _make_room(engine, cache, queue, requests, live)
        used = counters[PRIVATE] + cache.totals.sum()
        counters[PEAK_KV] = max(counters[PEAK_KV], used)
        counters[KV_STEPS] += counters[PRIVATE] + cache.totals[LOCKED]
        counters[DECODED] += counters[DECODING]
        memory = _memory_time(engine, live)
        total = tokens + counters[DECODING]
        charged = -(-total // engine.batch_multiple) * engine.batch_multiple
        compute = charged * engine.token_time_s + attention
        seconds = overlapped(compute, memory, engine.interference_exponent)
        sums[COMPUTE] += compute
        sums[MEMORY] += memory
        sums[MAKESPAN] += seconds
        if counters[STEP] >= samples.shape[1] * stride:
            half = samples.shape[1] // 2
            for j in range(half):
                for row in range(3):
                    samples[row, j] = samples[row, 2 * j] + samples[row, 2 * j + 1]
            samples[:, half:] = 0.0
            stride *= 2
        column = counters[STEP] // stride
        samples[0, column] += seconds
        samples[1, column] += compute
        samples[2, column] += memory
        _end_of_step(work, engine, cache, forecast, requests, live)
        _start_decoding(work, engine, cache, requests, live)
        counters[STEP] += 1
    return stride
