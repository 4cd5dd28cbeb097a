"""The task table: query tokens, their KV, their tile, and the place of the result.

A task is a range of query tokens in gather order x a span of KV positions of one table
row. A node task has all tokens below a kept node x the node's span. A suffix task has
tokens of one request x a span after its deepest kept node. A task's query tokens fit
into one tile of 16, 64 or 128 rows (tokens x query heads per KV head), each of which is a
launch of its own. A task and a KV head are one work item of the kernel.

    positions   0 ........ begin ........................ kv_len
                | node task | suffix, split 0 | split 1 (tail) |

The last split of a decode's suffix is a tail. Its end is read on the device from the
request's KV length, so the table stays valid while requests only grow. Short suffixes of
decodes below one node are packed into one task, whose loop reads them one after another. All
of their ends are read on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sgl_kernel_ext.shared_prefix_attention.forest import Batch, Layout
from sgl_kernel_ext.utils import jit

# Fields of a task.
START = 0  # first query token, in gather order
COUNT = 1  # query tokens
KV_BEGIN = 2  # first KV position
KV_END = 3  # one past the last KV position; for a tail, the planned one
TABLE_ROW = 4
FIRST_POSITION = 5  # of the first query token where the span is causal, or NO_CAUSAL
TAIL_OF = 6  # request whose KV length is the end, PACKED, or -1
PART = 7  # index of the result among the parts of a token, or -1: the output itself
TILE = 8  # index into TILE_ROWS
IS_NODE = 9
NUM_FIELDS = 10

# No KV position comes after it: nothing is masked.
NO_CAUSAL = 1 << 30

# The task has a suffix of each of its query tokens, which are requests. Its KV_END is
# KV_BEGIN plus the sum of their planned lengths.
PACKED = -2
PACK_SLACK = 1.125  # what a packed task may cost, as a multiple of a split

TILE_ROWS = (16, 64, 128)

# Indices into the settings of emit_tasks.
GROUP = 0  # query heads per KV head
MAX_TILE = 1  # rows of the largest tile in use
MIN_SPLIT = 2  # KV tokens
PART_BYTES = 3  # of one query row's partial result, written and read
TASK_BYTES = 4  # cost of starting a task, as bytes of KV
QUANTUM = 5  # the unit of split lengths, in KV tokens
# One value for each of the three tiles:
TOKEN_BYTES = 6  # cost of one KV token, as bytes of KV that take the time
PLACES = 9  # work items that run at the same time
KV_HEADS = 12
NUM_SETTINGS = 13

# Indices into the results of emit_tasks.
NUM_TASKS = 0
NUM_PARTS = 1
KV_TOKENS = 2  # read, each shared span counted once
KV_TOKENS_UNSHARED = 3  # if every request read all of its own KV
COST = 4  # of the plan, as bytes of KV of one KV head
COST_UNSHARED = 5
NUM_TAILS = 6  # requests whose end is read on the device
TILE_TASKS = 7  # for each of the three tiles
NUM_RESULTS = 10

# Fields of a span and of a launch, see split_budgets. A group of tasks has two.
TILES, READS, WRITES, PACKS = 0, 1, 2, 3
BUDGET, PACK_BUDGET, LARGE, SMALL, MERGED = 0, 1, 2, 4, 6

# Budgets are tried for which each place gets this many tasks, if it has this launch alone or,
# for BESIDE, all of them. UNPACKED is for suffixes of unequal lengths.
ROUNDS = (1.0, 2.0, 3.0, 4.0, 0.8, 1.0, 0.8, 1.0)
MAX_ROUNDS = 4
BESIDE = (5, 6)
UNPACKED = 7

# Sort keys hold the tile above the cost above the index.
TILE_BIT = 61
INDEX_BITS = 20
MAX_TASKS = 1 << INDEX_BITS


@jit
def tile_of(rows: int) -> int:
    """Index of the smallest tile that holds the rows."""
    return 0 if rows <= 16 else (1 if rows <= 64 else 2)


@jit
def tiles_of(tokens: int, settings: np.ndarray) -> tuple[int, int]:
    """The fewest tiles that hold the query tokens, and the tokens of each, about equally many."""
    if tokens == 1:  # nearly always: no division
        return 1, 1
    fitting = settings[MAX_TILE] // settings[GROUP]
    tiles = (tokens + fitting - 1) // fitting
    return tiles, (tokens + tiles - 1) // tiles


@jit
def num_splits(
    tokens: int, span: int, budgets: np.ndarray, settings: np.ndarray
) -> int:
    """Of a span, so that each costs about the budget of its tile."""
    tile = tile_of(tokens * settings[GROUP])
    # Rounded to the nearest number: one more than the places would start a second round.
    splits = span * settings[TOKEN_BYTES + tile] / budgets[tile] + 0.5
    most = span / max(settings[MIN_SPLIT], settings[QUANTUM])
    return max(1, int(min(splits, most)))


class Table(NamedTuple):
    """The task table, and what is needed to write it."""

    scratch: np.ndarray  # int32 [max_tasks, NUM_FIELDS], in the order of adding
    keys: np.ndarray  # int64 [max_tasks], for sorting
    tasks: np.ndarray  # int32 [max_tasks, NUM_FIELDS], by tile, largest first
    results: np.ndarray  # int64 [NUM_RESULTS]


@jit
def add_tasks(
    start: int,
    count: int,
    begin: int,
    end: int,
    splits: int,
    table_row: int,
    first_position: int,
    tail_of: int,
    part: int,
    is_node: bool,
    settings: np.ndarray,
    table: Table,
) -> None:
    """Add one task per split of a span. Splits are equal but for the rounding to their unit.

    Tasks past the end of the table are only counted.
    """
    tasks, keys, results = table.scratch, table.keys, table.results
    tile = tile_of(count * settings[GROUP])
    quantum = settings[QUANTUM]
    blocks = (end - begin + quantum - 1) // quantum if splits > 1 else 1
    kv_end = begin
    for i in range(splits):
        kv_begin = kv_end
        kv_end = end
        if i < splits - 1:
            kv_end = begin + (i + 1) * blocks // splits * quantum
        cost = (kv_end - kv_begin) * settings[TOKEN_BYTES + tile]
        index = results[NUM_TASKS]
        results[NUM_TASKS] += 1
        results[TILE_TASKS + tile] += 1
        # Packing saves starts without sharing as well, so it is no gain of sharing.
        starts = count if tail_of == PACKED else 1
        results[COST] += cost + starts * settings[TASK_BYTES]
        if index >= len(tasks):
            continue
        is_tail = tail_of != -1 and i == splits - 1
        results[NUM_TAILS] += count if is_tail else 0
        task = tasks[index]
        task[START] = start
        task[COUNT] = count
        task[KV_BEGIN] = kv_begin
        task[KV_END] = kv_end
        task[TABLE_ROW] = table_row
        causal = kv_end > first_position + 1
        task[FIRST_POSITION] = first_position if causal else NO_CAUSAL
        task[TAIL_OF] = tail_of if is_tail else -1
        direct = not is_node and part == 0 and splits == 1
        task[PART] = -1 if direct else part + i
        task[TILE] = tile
        task[IS_NODE] = is_node
        # Sorted in descending order: small tiles first, then the most expensive ones,
        # then in the order of adding.
        key = cost << INDEX_BITS | (MAX_TASKS - 1 - index)
        keys[index] = (2 - tile) << TILE_BIT | key


@jit
def split_budgets(batch: Batch, layout: Layout, settings: np.ndarray) -> np.ndarray:
    """What a split of each tile and, as the last value, a packed task should cost, so that
    the launches end soonest."""
    kv_len, node_end = batch.kv_len, batch.node_end
    num_nodes = len(node_end)
    spans = np.empty((3, num_nodes + len(kv_len), 4))  # of each tile
    num_spans, totals = np.zeros(3, np.int64), np.zeros(3)
    only_decodes = batch.q_len.max() == 1
    for j in range(num_nodes + len(kv_len)):
        i = j - num_nodes
        if i < 0 and not layout.keep[j]:
            continue
        above = layout.node_above[j] if i < 0 else layout.request_above[i]
        tokens = layout.node_tokens[j] if i < 0 else batch.q_len[i]
        num_tiles, count = tiles_of(tokens, settings)
        # The tiles of a chunk attend to half of the chunk on average.
        length = node_end[j] if i < 0 else kv_len[i] - (tokens - count) // 2
        length -= node_end[above] if above >= 0 else 0
        rows = count * settings[GROUP]
        tile = tile_of(rows)
        span = spans[tile, num_spans[tile]]
        span[TILES] = num_tiles
        span[READS] = length * settings[TOKEN_BYTES + tile]
        span[WRITES] = rows * settings[PART_BYTES] // 2
        span[PACKS] = only_decodes and i >= 0
        num_spans[tile] += 1
        totals[tile] += span[TILES] * span[READS]
    launches = np.zeros((3, len(ROUNDS), 7))
    for t in range(3):
        for i in range(len(ROUNDS) if totals[t] > 0 else 0):
            total = totals.sum() if i in BESIDE else totals[t]
            budget = total / (settings[PLACES + t] * ROUNDS[i]) * settings[KV_HEADS] + 1
            launches[t, i, BUDGET] = budget
            launches[t, i, PACK_BUDGET] = PACK_SLACK * budget if i != UNPACKED else 0.0
            group_tasks(spans[t, : num_spans[t]], t, settings, launches[t, i])
    # All launches alike, and then each in turn.
    chosen, soonest = np.zeros(3, np.int64), np.inf
    for first, last in ((0, 3), (0, 1), (1, 2), (2, 3), (0, 1), (1, 2), (2, 3)):
        for i in range(len(ROUNDS)):
            tried = chosen.copy()
            tried[first:last] = i
            end = end_of_launches(launches, tried)
            if end < soonest:
                soonest, chosen = end, tried
    budgets = np.ones(4, np.int64)
    for t in range(3):
        budgets[t] = max(1, int(launches[t, chosen[t], BUDGET]))
    budgets[3] = int(launches[0, chosen[0], PACK_BUDGET]) if only_decodes else 0
    return budgets


@jit
def group_tasks(
    spans: np.ndarray, t: int, settings: np.ndarray, launch: np.ndarray
) -> None:
    """Write the share and the time of a launch's tasks above half of its budget, which take the
    places in rounds, and of the others, which fill the gaps.

    The share is the number of tasks over that of places. The time is that in which the device
    reads so many bytes.
    """
    fitting = TILE_ROWS[0] // settings[GROUP]
    shortest = settings[TOKEN_BYTES + t] * max(settings[MIN_SPLIT], settings[QUANTUM])
    budget, pack_budget = launch[BUDGET], launch[PACK_BUDGET]
    per_budget, per_shortest = 1 / budget, 1 / shortest
    for j in range(len(spans)):
        count, each = spans[j, TILES], spans[j, READS]
        splits = int(min(each * per_budget + 0.5, each * per_shortest))
        if splits > 1:
            each = each / splits + spans[j, WRITES]
            count *= splits
            launch[MERGED] += count * spans[j, WRITES]
        elif 2 * each <= pack_budget and spans[j, PACKS] > 0:
            packed = min(fitting, int(pack_budget / each))
            each *= packed
            count /= packed
        group = LARGE if 2 * each > budget else SMALL
        launch[group] += count
        launch[group + 1] += count * each
    places = settings[PLACES + t] / settings[KV_HEADS]
    start = settings[TASK_BYTES] * settings[PLACES] / settings[KV_HEADS]
    for group in (LARGE, SMALL):
        each = launch[group + 1] / max(launch[group], 1e-9)
        # Tasks of many rounds are counted together: the time of a plan is bounded.
        together = max(1.0, launch[group] / (16 * places))
        launch[group + 1] = together * (each * places + start)
        launch[group] /= together * places


@jit
def end_of_launches(launches: np.ndarray, chosen: np.ndarray) -> float:
    """About when the launches and the merge of their parts end, wide tiles first. Each group of
    equal tasks takes the share of the device that is free first, and then the next."""
    free, since = np.zeros(8), np.zeros(8)
    free[0] = 1.0
    shares, end, merged = 1, 0.0, 0.0
    for t in (2, 1, 0):
        launch = launches[t, chosen[t]]
        merged += launch[MERGED]
        for group in (LARGE, SMALL):
            left, time = launch[group], launch[group + 1]
            while left > 1e-3:
                at = 0
                for i in range(1, shares):
                    if since[i] < since[at]:
                        at = i
                end = max(end, since[at] + time)
                if left < free[at]:
                    free[at] -= left
                    free[shares], since[shares] = left, since[at] + time
                    shares += 1
                    break
                since[at] += time
                left -= free[at]
    return end + merged


@jit
def add_node_tasks(
    batch: Batch,
    layout: Layout,
    budgets: np.ndarray,
    settings: np.ndarray,
    table: Table,
) -> np.ndarray:
    """Add all node tasks. Returns the parts per token of each node and those above.

    The last entry of the result is for no node.
    """
    node_end = batch.node_end
    keep, node_start, node_tokens, node_above, node_row = layout[:5]
    parts_up_to = np.zeros(len(node_end) + 1, np.int64)
    for node in range(len(node_end)):
        if not keep[node]:
            continue
        above = node_above[node]
        begin = node_end[above] if above >= 0 else 0
        end = node_end[node]
        _, count = tiles_of(node_tokens[node], settings)
        splits = num_splits(count, end - begin, budgets, settings)
        stop = node_start[node] + node_tokens[node]
        part = parts_up_to[above]
        for start in range(node_start[node], stop, count):
            here = min(count, stop - start)
            row = node_row[node]
            add_tasks(
                start, here, begin, end, splits, row, NO_CAUSAL, -1, part, True,
                settings, table,
            )  # fmt: skip
        parts_up_to[node] = part + splits
        table.results[KV_TOKENS] += end - begin
    return parts_up_to


@jit
def pack(
    at: int, begin: int, budget: int, fitting: int,
    gather: np.ndarray, kv_len: np.ndarray, request_above: np.ndarray,
) -> tuple[int, int]:  # fmt: skip
    """How many decodes from a position in gather order on are one task, and their suffixes'
    tokens, at most ``budget`` if there are several."""
    above = request_above[gather[at]]
    count, tokens = 0, 0
    for place in range(at, min(len(gather), at + fitting)):
        request = gather[place]
        own = kv_len[request] - begin
        if request_above[request] != above or tokens + own > budget:
            break
        count, tokens = count + 1, tokens + own
    return count, tokens


@jit
def add_suffix_tasks(
    batch: Batch,
    layout: Layout,
    gather: np.ndarray,
    parts_up_to: np.ndarray,
    budgets: np.ndarray,
    settings: np.ndarray,
    table: Table,
    counts: np.ndarray,  # int32 [num_tokens], written: parts in gather order
) -> None:
    """Add the tasks of every request after its deepest kept node."""
    q_len, kv_len, node_end = batch.q_len, batch.kv_len, batch.node_end
    request_start, request_above = layout.request_start, layout.request_above
    results = table.results
    only_decodes = len(gather) == len(q_len)
    packed = 0  # requests still to come of the last packed task
    most = budgets[3] // settings[TOKEN_BYTES]
    fitting = TILE_ROWS[0] // settings[GROUP]
    for k in range(len(q_len)):
        i = gather[k] if only_decodes else k
        above = request_above[i]
        begin = node_end[above] if above >= 0 else 0
        tail_of = i if q_len[i] == 1 else -1
        num_tiles, count = tiles_of(q_len[i], settings)
        part = parts_up_to[above]
        if only_decodes and packed == 0:
            packed, tokens = pack(
                k, begin, most, fitting, gather, kv_len, request_above
            )
            if packed > 1:
                add_tasks(
                    k, packed, begin, begin + tokens, 1, 0, NO_CAUSAL, PACKED,
                    part, False, settings, table,
                )  # fmt: skip
                counts[k : k + packed] = 0 if part == 0 else part + 1
            else:
                packed = 0
        for number in range(num_tiles):
            first = number * count
            here = min(count, q_len[i] - first)
            start = request_start[i] + first
            position = kv_len[i] - q_len[i] + first
            end = position + here
            results[COST_UNSHARED] += settings[TASK_BYTES]
            tile = tile_of(here * settings[GROUP])
            results[COST_UNSHARED] += end * settings[TOKEN_BYTES + tile]
            if packed > 0:
                continue
            splits = num_splits(here, end - begin, budgets, settings)
            add_tasks(
                start, here, begin, end, splits, batch.table_row[i], position, tail_of,
                part, False, settings, table,
            )  # fmt: skip
            parts = part + splits
            counts[start : start + here] = 0 if parts == 1 else parts
        packed = max(0, packed - 1)
        results[KV_TOKENS] += kv_len[i] - begin
        results[KV_TOKENS_UNSHARED] += kv_len[i]


@jit
def emit_tasks(
    batch: Batch,
    layout: Layout,
    gather: np.ndarray,  # int32 [num_tokens]
    settings: np.ndarray,  # int64 [NUM_SETTINGS]
    table: Table,  # written
    indptr: np.ndarray,  # int32 [num_tokens + 1], written: parts in gather order
) -> None:
    """Write the task table and the CSR of parts.

    A token whose only result is written to the output directly has no parts.
    ``results[NUM_TASKS]`` can exceed the size of the table, which is then not written.
    """
    _, keys, tasks, results = table
    results[:] = 0
    budgets = split_budgets(batch, layout, settings)
    parts_up_to = add_node_tasks(batch, layout, budgets, settings, table)
    add_suffix_tasks(
        batch, layout, gather, parts_up_to, budgets, settings, table, indptr[1:]
    )
    indptr[0] = 0
    for j in range(len(indptr) - 1):
        indptr[j + 1] += indptr[j]
    results[NUM_PARTS] = indptr[-1]
    results[COST] += results[NUM_PARTS] * settings[GROUP] * settings[PART_BYTES]
    num_tasks = results[NUM_TASKS]
    if num_tasks <= len(tasks):
        order = keys[:num_tasks]
        order.sort()
        for i in range(num_tasks):
            index = MAX_TASKS - 1 - (order[num_tasks - 1 - i] & (MAX_TASKS - 1))
            for field in range(NUM_FIELDS):
                tasks[i, field] = table.scratch[index, field]
