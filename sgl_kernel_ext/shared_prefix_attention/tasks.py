"""The task table: who attends to what, in which tile, and where the result goes.

A task is a range of query tokens in gather order x a span of KV positions of one table
row. Node tasks take all tokens below a kept node x the node's span; suffix tasks take
the tokens of one request x what follows its deepest kept node. A task's query tokens
fit one tile of 16, 64 or 128 rows (tokens x query heads per KV head). With every KV
head a task makes one work item of the kernel.

    positions   0 ........ begin ........................ kv_len
                | node task | suffix, split 0 | split 1 (tail) |

The last split of a decode's suffix is a tail: its end is read on the device from the
request's KV length, so the table stays right while requests only grow.
"""

from __future__ import annotations

import numpy as np

from sgl_kernel_ext.jit import jit

# Fields of a task.
START = 0  # first query token, in gather order
COUNT = 1  # query tokens
KV_BEGIN = 2  # first KV position
KV_END = 3  # one past the last KV position; of a tail as planned
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

# What emit_tasks is told.
GROUP = 0  # query heads per KV head
MAX_TILE = 1  # rows of the largest tile in use
MIN_SPLIT = 2  # KV tokens
PART_BYTES = 3  # of one query row's partial result, written and read
TARGET_TASKS = 4  # fewer than this, and long spans are split
TASK_BYTES = 5  # what starting a task costs, as bytes of KV
SEPARATE = 6  # 1: node tasks come first
TOKEN_BYTES = 7  # what one KV token costs in each of the three tiles, as bytes of KV
QUANTUM = 10  # split lengths are multiples of it, for each of the three tiles
NUM_SETTINGS = 13

# What emit_tasks tells.
NUM_TASKS = 0
NUM_NODE_TASKS = 1
NUM_PARTS = 2
KV_TOKENS = 3  # read, each shared span counted once
KV_TOKENS_UNSHARED = 4  # if every request read all of its own
COST = 5  # of the plan, as bytes of KV of one KV head
COST_UNSHARED = 6
NUM_TAILS = 7
NUM_RESULTS = 8

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
    """Query tokens per tile, with as few tiles as possible and those alike."""
    fitting = settings[MAX_TILE] // settings[GROUP]
    tiles = (tokens + fitting - 1) // fitting
    count: int = (tokens + tiles - 1) // tiles
    return count


@jit
def span_cost(tokens: int, tiles: int, span: int, settings: np.ndarray) -> int:
    """Cost of reading a span in so many tiles of so many query tokens each."""
    tile = tile_of(tokens * settings[GROUP])
    cost: int = tiles * span * settings[TOKEN_BYTES + tile]
    return cost


@jit
def split_length(tokens: int, span: int, budget: int, settings: np.ndarray) -> int:
    """KV tokens per split, so that a split's cost comes near the budget."""
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
    tasks: np.ndarray,
    keys: np.ndarray,
    results: np.ndarray,
) -> int:
    """Add one task per split of a span; returns how many.

    Past the end of the table tasks are only counted.
    """
    splits = max(1, (end - begin + length - 1) // length)
    tile = tile_of(count * settings[GROUP])
    for i in range(splits):
        kv_begin = begin + i * length
        kv_end = min(end, kv_begin + length)
        cost = (kv_end - kv_begin) * settings[TOKEN_BYTES + tile]
        index = results[NUM_TASKS]
        results[NUM_TASKS] += 1
        results[NUM_NODE_TASKS] += is_node
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
        # Descending keys: node tasks first where they are kept apart, then the
        # dearest first, then in the order of adding.
        key = cost << INDEX_BITS | (MAX_TASKS - 1 - index)
        keys[index] = key | (is_node * settings[SEPARATE]) << 62
    return splits


@jit
def split_budget(
    q_len: np.ndarray,
    kv_len: np.ndarray,
    request_above: np.ndarray,
    keep: np.ndarray,
    node_end: np.ndarray,
    node_above: np.ndarray,
    node_tokens: np.ndarray,
    settings: np.ndarray,
) -> int:
    """Cost that a task should not exceed if there are to be enough tasks."""
    total = 0
    for node in range(len(keep)):
        if keep[node]:
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
        # The tiles of a chunk see on average half of the chunk.
        span = kv_len[i] - begin - (q_len[i] - count) // 2
        total += span_cost(count, tiles, span, settings)
    budget: int = total // settings[TARGET_TASKS]
    return budget


@jit
def add_node_tasks(
    keep: np.ndarray,
    node_end: np.ndarray,
    node_above: np.ndarray,
    node_start: np.ndarray,
    node_tokens: np.ndarray,
    node_row: np.ndarray,
    budget: int,
    settings: np.ndarray,
    tasks: np.ndarray,
    keys: np.ndarray,
    results: np.ndarray,
) -> np.ndarray:
    """Add all node tasks; returns the parts per token from each node and above it.

    The last entry of the result stands for no node at all.
    """
    parts_up_to = np.zeros(len(keep) + 1, np.int64)
    for node in range(len(keep)):
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
                settings, tasks, keys, results,
            )  # fmt: skip
        parts_up_to[node] = part + splits
        results[KV_TOKENS] += end - begin
    return parts_up_to


@jit
def add_suffix_tasks(
    q_len: np.ndarray,
    kv_len: np.ndarray,
    table_row: np.ndarray,
    request_start: np.ndarray,
    request_above: np.ndarray,
    node_end: np.ndarray,
    parts_up_to: np.ndarray,
    budget: int,
    settings: np.ndarray,
    tasks: np.ndarray,
    keys: np.ndarray,
    counts: np.ndarray,  # int32 [num_tokens], written: parts in gather order
    results: np.ndarray,
) -> None:
    """Add the tasks of every request from its deepest kept node on."""
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
                start, here, begin, end, length, table_row[i], position, tail_of, part,
                False, settings, tasks, keys, results,
            )  # fmt: skip
            counts[start : start + here] = 0 if parts == 1 else parts
            results[COST_UNSHARED] += settings[TASK_BYTES]
            results[COST_UNSHARED] += span_cost(here, 1, end, settings)
        results[KV_TOKENS] += kv_len[i] - begin
        results[KV_TOKENS_UNSHARED] += kv_len[i]


@jit
def emit_tasks(
    q_len: np.ndarray,  # int32 [n]
    kv_len: np.ndarray,  # int32 [n]
    table_row: np.ndarray,  # int32 [n]
    request_start: np.ndarray,  # int32 [n]
    request_above: np.ndarray,  # int32 [n]
    keep: np.ndarray,  # bool [m]
    node_end: np.ndarray,  # int32 [m]
    node_above: np.ndarray,  # int32 [m]
    node_start: np.ndarray,  # int32 [m]
    node_tokens: np.ndarray,  # int32 [m]
    node_row: np.ndarray,  # int32 [m]
    settings: np.ndarray,  # int64 [NUM_SETTINGS]
    scratch: np.ndarray,  # int32 [max_tasks, NUM_FIELDS], overwritten
    keys: np.ndarray,  # int64 [max_tasks], overwritten
    tasks: np.ndarray,  # int32 [max_tasks, NUM_FIELDS], written, largest first
    indptr: np.ndarray,  # int32 [num_tokens + 1], written: parts in gather order
    results: np.ndarray,  # int64 [NUM_RESULTS], written
) -> None:
    """Write the task table and the CSR of parts.

    A token whose one and only result goes to the output directly has no parts.
    ``results[NUM_TASKS]`` may exceed the size of the table, which then is not written.
    """
    results[:] = 0
    budget = split_budget(
        q_len, kv_len, request_above, keep, node_end, node_above, node_tokens, settings
    )
    parts_up_to = add_node_tasks(
        keep, node_end, node_above, node_start, node_tokens, node_row, budget,
        settings, scratch, keys, results,
    )  # fmt: skip
    add_suffix_tasks(
        q_len, kv_len, table_row, request_start, request_above, node_end, parts_up_to,
        budget, settings, scratch, keys, indptr[1:], results,
    )  # fmt: skip
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
            tasks[i] = scratch[index]
