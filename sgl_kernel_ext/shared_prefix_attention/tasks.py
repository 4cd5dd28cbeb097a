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
# One value for each of the three tiles:
TOKEN_BYTES = 5  # cost of one KV token, as bytes of KV that take the time
QUANTUM = 8  # the unit of split lengths, in KV tokens
PLACES = 11  # tasks that run at the same time
NUM_SETTINGS = 14

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

# Budgets of tasks are tried for which each place gets 1 to this many. More are not worth
# their starts. The first one is also tried without packing, for suffixes of unequal lengths.
MAX_ROUNDS = 4

# A split moves at least this many times the bytes of the partial result it adds.
SPLIT_PAYS = 4

# Sort keys hold the tile above the cost above the index.
TILE_BIT = 61
INDEX_BITS = 20
MAX_TASKS = 1 << INDEX_BITS


@jit
def tile_of(rows: int) -> int:
    """Index of the smallest tile that holds the rows."""
    return 0 if rows <= 16 else (1 if rows <= 64 else 2)


@jit
def tokens_per_tile(tokens: int, settings: np.ndarray) -> int:
    """Query tokens per tile, for the fewest tiles of about equal size."""
    if tokens == 1:
        return 1
    fitting = settings[MAX_TILE] // settings[GROUP]
    tiles = (tokens + fitting - 1) // fitting
    count: int = (tokens + tiles - 1) // tiles
    return count


@jit
def split_length(
    tokens: int, span: int, budgets: np.ndarray, settings: np.ndarray
) -> int:
    """KV tokens per split, for splits that cost about the budget of their tile."""
    rows = tokens * settings[GROUP]
    tile = tile_of(rows)
    token_bytes = settings[TOKEN_BYTES + tile]
    pays = SPLIT_PAYS * rows * settings[PART_BYTES] // token_bytes
    # Rounded to the nearest number: one more than the places would start a second round.
    splits = (span * token_bytes + budgets[tile] // 2) // budgets[tile]
    splits = min(splits, span // max(settings[MIN_SPLIT], pays))
    if splits <= 1:
        return max(span, 1)
    quantum = settings[QUANTUM + tile]
    length = (span + splits - 1) // splits
    rounded: int = (length + quantum - 1) // quantum * quantum
    return rounded


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
    length: int,
    table_row: int,
    first_position: int,
    tail_of: int,
    part: int,
    is_node: bool,
    settings: np.ndarray,
    table: Table,
) -> int:
    """Add one task per split of a span. Returns the number of splits.

    Tasks past the end of the table are only counted.
    """
    tasks, keys, results = table.scratch, table.keys, table.results
    splits = max(1, (end - begin + length - 1) // length)
    tile = tile_of(count * settings[GROUP])
    for i in range(splits):
        kv_begin = begin + i * length
        kv_end = min(end, kv_begin + length)
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
    return splits


@jit
def split_budgets(batch: Batch, layout: Layout, settings: np.ndarray) -> np.ndarray:
    """What a split of each tile and, as the last value, a packed task should cost, so that
    each launch ends soonest."""
    kv_len, node_end = batch.kv_len, batch.node_end
    num_nodes = len(node_end)
    tile = np.full(num_nodes + len(kv_len), -1)  # of nodes, then of suffixes
    tiles, cost = np.zeros_like(tile), np.zeros(len(tile))
    totals = np.zeros(3, np.int64)
    for j in range(len(tile)):
        i = j - num_nodes
        if i < 0 and not layout.keep[j]:
            continue
        above = layout.node_above[j] if i < 0 else layout.request_above[i]
        tokens = layout.node_tokens[j] if i < 0 else batch.q_len[i]
        count = tokens_per_tile(tokens, settings)
        span = node_end[j] if i < 0 else kv_len[i] - (tokens - count) // 2
        span -= node_end[above] if above >= 0 else 0
        tile[j] = tile_of(count * settings[GROUP])
        tiles[j] = (tokens + count - 1) // count
        # The tiles of a chunk attend to half of the chunk on average.
        cost[j] = span * settings[TOKEN_BYTES + tile[j]]
        totals[tile[j]] += tiles[j] * cost[j]
    budgets = np.ones(4, np.int64)
    only_decodes = batch.q_len.max() == 1
    for t in range(3):
        soonest = np.inf
        for i in range(MAX_ROUNDS + 1 if totals[t] > 0 else 0):
            rounds = (i + 1) % (MAX_ROUNDS + 1)  # 0, without packing, comes last
            budget = totals[t] / (settings[PLACES + t] * max(1, rounds)) + 1
            packs = only_decodes and rounds > 0 and t == 0
            pack_budget = PACK_SLACK * budget if packs else 0.0
            end = launch_end(
                budget, pack_budget, t, num_nodes, tile, tiles, cost, settings
            )
            if end < soonest:
                soonest, budgets[t] = end, int(budget)
                budgets[3] = int(pack_budget) if t == 0 else budgets[3]
    return budgets


@jit
def launch_end(
    budget: float, pack_budget: float, t: int, num_nodes: int,
    tile: np.ndarray, tiles: np.ndarray, cost: np.ndarray, settings: np.ndarray,
) -> float:  # fmt: skip
    """About when the last place of a tile has read its share, if tasks cost the budgets.

    Tasks above half of it take the places in whole rounds, and the others fill the gaps.
    """
    places, start = settings[PLACES + t], settings[TASK_BYTES]
    longest = 1 / (settings[TOKEN_BYTES + t] * settings[MIN_SPLIT])
    fitting = TILE_ROWS[0] // settings[GROUP]
    part = TILE_ROWS[t] * settings[PART_BYTES]
    per_budget = 1 / budget
    total, wide, wide_total = 0.0, 0.0, 0.0
    for j in range(len(tile)):
        if tile[j] != t:
            continue
        each, tasks = cost[j], float(tiles[j])
        splits = int(min(each * per_budget + 0.5, each * longest))
        if splits > 1:
            each = each / splits + part
            tasks *= splits
        elif j >= num_nodes and 2 * each <= pack_budget:
            packed = min(fitting, int(pack_budget / each))
            each *= packed
            tasks /= packed
        each += start
        total += tasks * each
        if 2 * each > budget:
            wide += tasks
            wide_total += tasks * each
    rounds = np.ceil(wide / places - 0.001)
    end: float = max(total / places, rounds * wide_total / max(wide, 1.0))
    return end


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
        count = tokens_per_tile(node_tokens[node], settings)
        length = split_length(count, end - begin, budgets, settings)
        stop = node_start[node] + node_tokens[node]
        part = parts_up_to[above]
        splits = 0
        for start in range(node_start[node], stop, count):
            here = min(count, stop - start)
            row = node_row[node]
            splits = add_tasks(
                start, here, begin, end, length, row, NO_CAUSAL, -1, part, True,
                settings, table,
            )  # fmt: skip
        parts_up_to[node] = part + splits
        table.results[KV_TOKENS] += end - begin
    return parts_up_to


@jit
def pack(
    at: int, batch: Batch, layout: Layout, gather: np.ndarray, budget: int, group: int
) -> tuple[int, int]:
    """How many decodes from a position in gather order on are one task, and their suffixes'
    tokens, at most ``budget`` if there are several."""
    above = layout.request_above[gather[at]]
    begin = batch.node_end[above] if above >= 0 else 0
    count, tokens = 0, 0
    for place in range(at, min(len(gather), at + TILE_ROWS[0] // group)):
        request = gather[place]
        own = batch.kv_len[request] - begin
        if layout.request_above[request] != above or tokens + own > budget:
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
    for k in range(len(q_len)):
        i = gather[k] if only_decodes else k
        above = request_above[i]
        begin = node_end[above] if above >= 0 else 0
        tail_of = i if q_len[i] == 1 else -1
        count = tokens_per_tile(q_len[i], settings)
        part = parts_up_to[above]
        if only_decodes and packed == 0:
            packed, tokens = pack(k, batch, layout, gather, most, settings[GROUP])
            if packed > 1:
                add_tasks(
                    k, packed, begin, begin + tokens, tokens, 0, NO_CAUSAL, PACKED,
                    part, False, settings, table,
                )  # fmt: skip
                counts[k : k + packed] = 0 if part == 0 else part + 1
            else:
                packed = 0
        for first in range(0, q_len[i], count):
            here = min(count, q_len[i] - first)
            start = request_start[i] + first
            position = kv_len[i] - q_len[i] + first
            end = position + here
            results[COST_UNSHARED] += settings[TASK_BYTES]
            tile = tile_of(here * settings[GROUP])
            results[COST_UNSHARED] += end * settings[TOKEN_BYTES + tile]
            if packed > 0:
                continue
            length = split_length(here, end - begin, budgets, settings)
            parts = part + add_tasks(
                start, here, begin, end, length, batch.table_row[i], position, tail_of,
                part, False, settings, table,
            )  # fmt: skip
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
