"""The task table: query tokens, their KV, their tile, and the place of the result.

A task is a range of query tokens in gather order x a span of KV positions of one table
row. A node task has all tokens below a kept node x the node's span. A suffix task has
tokens of one request x a span after its deepest kept node. A task's query tokens fit
into one tile of 16, 64 or 128 rows (tokens x query heads per KV head). A task and a KV
head are one work item of the kernel.

    positions   0 ........ begin ........................ kv_len
                | node task | suffix, split 0 | split 1 (tail) |

The last split of a decode's suffix is a tail. Its end is read on the device from the
request's KV length, so the table stays valid while requests only grow.
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
TAIL_OF = 6  # request whose KV length is the end, or -1
PART = 7  # index of the result among the parts of a token, or -1: the output itself
TILE = 8  # index into TILE_ROWS
IS_NODE = 9
NUM_FIELDS = 10

# No KV position comes after it: nothing is masked.
NO_CAUSAL = 1 << 30

TILE_ROWS = (16, 64, 128)

# Indices into the settings of emit_tasks.
GROUP = 0  # query heads per KV head
MAX_TILE = 1  # rows of the largest tile in use
MIN_SPLIT = 2  # KV tokens
PART_BYTES = 3  # of one query row's partial result, written and read
TARGET_TASKS = 4  # fewer than this, and long spans are split
TASK_BYTES = 5  # cost of starting a task, as bytes of KV
TOKEN_BYTES = 6  # for each of the three tiles, cost of one KV token, as bytes of KV
QUANTUM = 9  # for each of the three tiles, the unit of split lengths, in KV tokens
NUM_SETTINGS = 12

# Indices into the results of emit_tasks.
NUM_TASKS = 0
NUM_PARTS = 1
KV_TOKENS = 2  # read, each shared span counted once
KV_TOKENS_UNSHARED = 3  # if every request read all of its own KV
COST = 4  # of the plan, as bytes of KV of one KV head
COST_UNSHARED = 5
NUM_TAILS = 6
NUM_RESULTS = 7

# A split moves at least this many times the bytes of the partial result it adds.
SPLIT_PAYS = 4

# Sort keys hold the cost above the index.
INDEX_BITS = 20
MAX_TASKS = 1 << INDEX_BITS


@jit
def tile_of(rows: int) -> int:
    """Index of the smallest tile that holds the rows."""
    return 0 if rows <= 16 else (1 if rows <= 64 else 2)


@jit
def tokens_per_tile(tokens: int, settings: np.ndarray) -> int:
    """Query tokens per tile, for the fewest tiles of about equal size."""
    fitting = settings[MAX_TILE] // settings[GROUP]
    tiles = (tokens + fitting - 1) // fitting
    count: int = (tokens + tiles - 1) // tiles
    return count


@jit
def span_cost(tokens: int, tiles: int, span: int, settings: np.ndarray) -> int:
    """Cost of reading a span in ``tiles`` tiles of ``tokens`` query tokens each."""
    tile = tile_of(tokens * settings[GROUP])
    cost: int = tiles * span * settings[TOKEN_BYTES + tile]
    return cost


@jit
def split_length(tokens: int, span: int, budget: int, settings: np.ndarray) -> int:
    """KV tokens per split, for splits that cost about the budget."""
    rows = tokens * settings[GROUP]
    tile = tile_of(rows)
    token_bytes = settings[TOKEN_BYTES + tile]
    pays = SPLIT_PAYS * rows * settings[PART_BYTES] // token_bytes
    wanted = max(budget // token_bytes, settings[MIN_SPLIT], pays)
    splits = (span + wanted - 1) // wanted
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
    tasks: np.ndarray  # int32 [max_tasks, NUM_FIELDS], largest first
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
        results[COST] += cost + settings[TASK_BYTES]
        if index >= len(tasks):
            continue
        is_tail = tail_of >= 0 and i == splits - 1
        results[NUM_TAILS] += is_tail
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
        # Sorted in descending order: the most expensive ones first, then in the order
        # of adding.
        keys[index] = cost << INDEX_BITS | (MAX_TASKS - 1 - index)
    return splits


@jit
def split_budget(batch: Batch, layout: Layout, settings: np.ndarray) -> int:
    """The most that a task should cost, so that there are enough tasks."""
    q_len, kv_len, node_end = batch.q_len, batch.kv_len, batch.node_end
    node_above, node_tokens = layout.node_above, layout.node_tokens
    request_above = layout.request_above
    total = 0
    for node in range(len(node_end)):
        if layout.keep[node]:
            above = node_above[node]
            span = node_end[node] - (node_end[above] if above >= 0 else 0)
            count = tokens_per_tile(node_tokens[node], settings)
            tiles = (node_tokens[node] + count - 1) // count
            total += span_cost(count, tiles, span, settings)
    for i in range(len(q_len)):
        above = request_above[i]
        begin = node_end[above] if above >= 0 else 0
        count = tokens_per_tile(q_len[i], settings)
        tiles = (q_len[i] + count - 1) // count
        # The tiles of a chunk attend to half of the chunk on average.
        span = kv_len[i] - begin - (q_len[i] - count) // 2
        total += span_cost(count, tiles, span, settings)
    budget: int = total // settings[TARGET_TASKS]
    return budget


@jit
def add_node_tasks(
    batch: Batch, layout: Layout, budget: int, settings: np.ndarray, table: Table
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
        length = split_length(count, end - begin, budget, settings)
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
def add_suffix_tasks(
    batch: Batch,
    layout: Layout,
    parts_up_to: np.ndarray,
    budget: int,
    settings: np.ndarray,
    table: Table,
    counts: np.ndarray,  # int32 [num_tokens], written: parts in gather order
) -> None:
    """Add the tasks of every request after its deepest kept node."""
    q_len, kv_len, node_end = batch.q_len, batch.kv_len, batch.node_end
    request_start, request_above = layout.request_start, layout.request_above
    results = table.results
    for i in range(len(q_len)):
        above = request_above[i]
        begin = node_end[above] if above >= 0 else 0
        tail_of = i if q_len[i] == 1 else -1
        count = tokens_per_tile(q_len[i], settings)
        part = parts_up_to[above]
        for first in range(0, q_len[i], count):
            here = min(count, q_len[i] - first)
            start = request_start[i] + first
            position = kv_len[i] - q_len[i] + first
            end = position + here
            length = split_length(here, end - begin, budget, settings)
            parts = part + add_tasks(
                start, here, begin, end, length, batch.table_row[i], position, tail_of,
                part, False, settings, table,
            )  # fmt: skip
            counts[start : start + here] = 0 if parts == 1 else parts
            results[COST_UNSHARED] += settings[TASK_BYTES]
            results[COST_UNSHARED] += span_cost(here, 1, end, settings)
        results[KV_TOKENS] += kv_len[i] - begin
        results[KV_TOKENS_UNSHARED] += kv_len[i]


@jit
def emit_tasks(
    batch: Batch,
    layout: Layout,
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
    budget = split_budget(batch, layout, settings)
    parts_up_to = add_node_tasks(batch, layout, budget, settings, table)
    add_suffix_tasks(batch, layout, parts_up_to, budget, settings, table, indptr[1:])
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
            tasks[i] = table.scratch[index]
