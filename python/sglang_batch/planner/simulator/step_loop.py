"""The steps of the simulator: admission, prompts, decodes, and the time they take.

When KV is short, requests are moved to the host. As in the scheduler inside SGLang, the newest
requests are offloaded, none of their KV is computed again, and no other request is admitted
before they have resumed.
"""

from __future__ import annotations

from ..compiled import jit_in_place
from ..costs.cost_model import MIN_SPLIT_GAIN, matrix_seconds, mixing_loss_s, overlapped
from ..kv_lengths.batch_state import tick
from ..requests import Floats
from . import prefix_cache as prefix
from .batch_admission import add_all, batch_prefill, take_notes
from .engine_state import (
    COMES_BACK,
    KV_MARGIN,
    RowHeap,
    RowLengths,
    Sim,
    find_longest,
    in_pages,
    note,
)
from .prefix_cache import GARBAGE, IDLE, LOCKED
from .request_stages import (
    decode_kv,
    end_of_step,
    grow,
    kv_in_use,
    make_room,
    over_capacity,
    put_back,
    release_ended,
    reload,
    retract_newest,
    start_decoding,
)
from .step_admission import (
    apart,
    compute_begun,
    dual_prefill,
    fits,
    kv_reads,
    prompt_begun,
    static_prefill,
)

# Limits of the density of the remaining work, as a factor both ways.
_DENSITY_RANGE = 1e6
# Steps after which the density of the remaining work is computed again.
_RETARGET_STEPS = 64
# Factor per step by which a raised KV margin returns to its normal size.
_MARGIN_DOWN = 0.998


@jit_in_place
def _remaining_density(sim: Sim) -> float:
    """Compute time over KV read time of the remaining work, by the estimates."""
    state = sim.state
    reads = max(state.kv_read_planned - state.kv_read, 1e-9)
    density = max(state.compute_planned - state.work, 0.0) / reads
    return float(min(max(density, 1.0 / _DENSITY_RANGE), _DENSITY_RANGE))


@jit_in_place
def _grow(sim: Sim, heap: RowHeap, lengths: RowLengths | None) -> None:
    """Add one KV token to every decoding request, retracting requests if KV is short."""
    state = sim.state
    totals = sim.cache.totals
    while over_capacity(sim):
        if sim.engine.as_sglang or not retract_newest(sim):
            break
        if lengths is not None and sim.engine.dense:
            take_notes(sim, heap, lengths)
    grow(sim)
    make_room(sim)
    used = kv_in_use(sim)
    held = used + totals[IDLE] + totals[GARBAGE]
    if sim.engine.dense:
        used = held = state.decoding * (state.longest + 1)
    state.peak_kv = max(state.peak_kv, held)
    state.kv_steps += used


@jit_in_place
def _sample(samples: Floats, stride: int, step: int, values: tuple[float, ...]) -> int:
    """Add a step to its column. When all columns are full, join them in pairs. Returns
    steps per column."""
    if step >= samples.shape[1] * stride:
        half = samples.shape[1] // 2
        for row in range(len(samples)):
            for j in range(half):
                samples[row, j] = samples[row, 2 * j] + samples[row, 2 * j + 1]
            for j in range(half, samples.shape[1]):
                samples[row, j] = 0.0
        stride *= 2
    column = step // stride
    for row in range(len(samples)):
        samples[row, column] += values[row]
    return stride


@jit_in_place
def _prompts(
    sim: Sim, heap: RowHeap, lengths: RowLengths | None, target: float
) -> tuple[int, float]:
    """Take the notes of the last step, and compute prompts."""
    state = sim.state
    if lengths is None:
        find_longest(sim, heap)
    else:
        take_notes(sim, heap, lengths)
    state.cut = 0
    if sim.engine.as_sglang:
        state.held_back = 0
        if not offload_for_decodes(sim):
            resume(sim)
        if state.num_offloaded > 0:  # no other request is admitted
            left = max(0, sim.engine.step_tokens - state.decoding)
            return compute_begun(sim, left)
    if lengths is not None:
        return batch_prefill(sim, heap, lengths)
    if sim.queue.dual:
        return dual_prefill(sim, target)
    return static_prefill(sim)


@jit_in_place
def _step_seconds(
    sim: Sim, tokens: int, decoding: int, attention: float, reads: float
) -> tuple[float, float, float]:
    """Seconds of a step that arithmetic takes, that reads take, and all others.

    Args:
        tokens: of prompts and answers.
        attention: seconds of attention over prompts, and of encoders.
        reads: tokens of KV that all answers read.
    """
    table, extras, state = sim.table, sim.engine.extras, sim.state
    rows = decoding + state.prompts
    compute, memory, other = matrix_seconds(table, tokens, rows)
    compute += attention
    memory += reads * sim.engine.kv_read_time_s
    decode_s = extras.decode_s
    if state.prompts == 0 and state.after_prompts > 0:
        other += extras.after_prompts_s
    state.after_prompts = state.prompts
    if state.prompts > 0:
        other += extras.prompt_step_s + extras.prompt_s * state.prompts
        other += extras.prompt_context_s * state.context
        other += extras.prompt_square_s * state.squares
        decode_s = extras.mixed_decode_s
        if decoding > 0:
            other += extras.mixed_kv_token_s * reads
            other += extras.mixed_square_s * reads * reads / decoding
            # Else the engine would compute the prompts first, and decode in a second step.
            loss = mixing_loss_s(sim.engine.mixing, tokens - decoding, decoding, reads)
            if loss > 0.0:
                other -= loss
                state.apart += 1
                state.after_prompts = 0
    return compute, memory, other + decode_s * decoding


@jit_in_place
def _split_seconds(sim: Sim, tokens: int, attention: float, reads: float) -> float:
    """Seconds of a mixed step as two forwards at the same time, which both read the weights."""
    state, table = sim.state, sim.table
    compute, memory, _ = matrix_seconds(table, tokens - state.decoding, state.prompts)
    prompts = compute + memory + attention
    compute, memory, _ = matrix_seconds(table, state.decoding, state.decoding)
    decodes = compute + memory + reads * sim.engine.kv_read_time_s
    return float(overlapped(prompts, decodes, sim.engine.split_exponent))


@jit_in_place
def _charge(
    sim: Sim, tokens: int, attention: float, alone: bool, ended: int
) -> tuple[float, float, float]:
    """Add the time of a step to the totals. Returns its seconds, and its compute and memory time.

    Args:
        alone: whether rows do not decode in it.
        ended: requests that ended in the step before.
    """
    engine, state = sim.engine, sim.state
    decoding = 0 if alone else state.decoding
    charged = tokens + decoding
    attention += state.media * engine.encoder_token_time_s
    reads = 0.0 if alone else kv_reads(sim)
    compute, memory, other = _step_seconds(sim, charged, decoding, attention, reads)
    other += ended * engine.extras.request_s
    seconds = overlapped(compute, memory, engine.interference_exponent) + other
    if engine.split_exponent > 1.0 and state.prompts > 0 and decoding > 0:
        split = _split_seconds(sim, charged, attention, reads) + other
        if seconds >= (1.0 + MIN_SPLIT_GAIN) * split:
            seconds = split
    state.work += charged * engine.token_time_s + attention
    state.compute += compute
    state.memory += memory
    state.kv_read += reads * engine.kv_read_time_s
    state.seconds += seconds
    state.media = 0
    state.prompts = 0
    state.context = state.squares = 0.0
    if alone:
        state.apart += 1
    return seconds, compute, memory


@jit_in_place
def run_steps(
    sim: Sim, heap: RowHeap, lengths: RowLengths | None, samples: Floats
) -> int:
    """Simulate steps until the job has ended. Returns the steps per column of ``samples``.

    Args:
        heap: rows that decode.
        lengths: None where an order is followed and KV is paged.
        samples: float64 ``[6, s]`` of zeros, ``s`` even, to which each step is added: its seconds,
            compute and memory time, rows that decode, their tokens of KV, and those of the longest.
    """
    engine = sim.engine
    state = sim.state
    stride = 1
    target = 1.0
    counted = 0
    if lengths is not None and sim.queue.rule > 0:
        add_all(sim, lengths)
    while state.done < len(sim.requests):
        if sim.queue.dual and (engine.as_sglang or state.step % _RETARGET_STEPS == 1):
            target = _remaining_density(sim)
        tokens, attention = _prompts(sim, heap, lengths, target)
        # SGLang would continue one of the prompts in the next step, before rows decode again.
        alone = engine.as_sglang and prompt_begun(sim) and apart(sim, tokens)
        if not alone:
            _grow(sim, heap, lengths)
        if engine.as_sglang and tokens + state.decoding == 0:
            # Nothing runs: only free the KV of ended requests.
            state.idle += 1
            end_of_step(sim)
            state.step += 1
            continue
        seconds, compute, memory = _charge(
            sim, tokens, attention, alone, state.done - counted
        )
        counted = state.done
        step = state.step - 1 - state.idle
        rows = held = longest = 0.0
        if not alone:
            rows, longest = float(state.decoding), float(state.longest)
            held = float(state.read_base + state.decoding * state.step)
        stride = _sample(
            samples, stride, step, (seconds, compute, memory, rows, held, longest)
        )
        if alone:
            continue
        if lengths is not None and sim.queue.rule > 0 and state.decoding > 0:
            tick(lengths.batches)
        if engine.as_sglang and state.decoding > 0:
            state.clock += 1
        end_of_step(sim)
        start_decoding(sim)
        if not engine.as_sglang:
            state.clock += 1
        state.margin = max(KV_MARGIN, state.margin * _MARGIN_DOWN)
        state.step += 1
    state.seconds += (state.done - counted) * engine.extras.request_s
    return stride


# Decode steps that fit after requests were offloaded.
_STEPS_FREED = 8
# When KV runs out despite the forecast, admission leaves a larger share of it free.
_MARGIN_UP, _MARGIN_MAX = 2.0, 0.2


@jit_in_place
def offload_for_decodes(sim: Sim) -> bool:
    """Free KV for the next decodes. Returns whether any request was offloaded."""
    state = sim.state
    capacity = sim.engine.kv_capacity
    if kv_in_use(sim) + decode_kv(sim) <= capacity:
        return False
    release_ended(sim)
    if kv_in_use(sim) + decode_kv(sim) <= capacity:
        return False
    state.margin = min(_MARGIN_MAX, state.margin * _MARGIN_UP)
    wanted = state.decoding * max(_STEPS_FREED, sim.engine.page_size)
    offloaded = False
    while capacity - kv_in_use(sim) < wanted and state.decoding > 1:
        if not retract_newest(sim):
            break
        offloaded = True
    return offloaded


@jit_in_place
def resume(sim: Sim) -> None:
    """Resume offloaded requests, in the order in which they were offloaded."""
    state = sim.state
    while state.num_offloaded > 0:
        i = sim.places[state.first_offloaded].offloaded
        r = sim.requests[i]
        node = r.node
        gone = prefix.cached_depth(sim.cache, node) < sim.cache.nodes[node].depth
        if not gone and not (_has_room(sim, i) and fits(sim, i, 0)):
            break
        state.first_offloaded = (state.first_offloaded + 1) % len(sim.places)
        state.num_offloaded -= 1
        if gone:  # its prefix was evicted: it waits, and computes its prompt again
            put_back(sim, i)
        else:
            reload(sim, i)
            note(sim, i, COMES_BACK)


@jit_in_place
def _has_room(sim: Sim, i: int) -> bool:
    state = sim.state
    r = sim.requests[i]
    needed = in_pages(sim, r.own + r.generated)
    needed += prefix.newly_locked(sim.cache, r.node)[0]
    needed += decode_kv(sim) + sim.engine.page_size
    return bool(
        state.private + sim.cache.totals[LOCKED] + needed <= sim.engine.kv_capacity
    )
