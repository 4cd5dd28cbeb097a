"""Chooses the nodes of a prefix forest that are worth a task of their own.

A node covers the tokens from its parent's end to its own end. It is either kept or
folded. The KV of a kept node is read once for all query rows below it. The KV of a
folded node is read by every part below it (a kept node, or the suffix of a request),
which starts that much earlier.

Costs are bytes per KV head that pass between memory and a multiprocessor. With ``rows``
= query tokens below x query heads per KV head and ``tiles`` = ceil(rows / rows of the
largest tile), a part from position ``s`` to ``e`` reads ``tiles * (e - s) * kv_bytes``.
A kept node also costs

- ``rows * part_bytes``: its partial outputs and lse, float32, are written and read once
- ``tiles * task_bytes``: the start of one more task, as bytes of KV that could have been
  read in that time

The total is a sum over kept nodes and requests in which a node depends only on its
nearest kept ancestor. So the cheapest choice is found exactly, from the leaves to the
roots: for every node and every ancestor that may be its nearest kept one, the cost of
keeping is compared with the cost of folding. A tie folds. The model counts one split
per node. Splits are made later, if there are too few tasks, and a suffix with the
node's tokens would be split in the same way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sgl_kernel_ext.utils import jit


class Batch(NamedTuple):
    """A batch and its forest, see :meth:`.AttentionPlanner.plan`. int32."""

    q_len: np.ndarray  # [n]
    kv_len: np.ndarray  # [n]
    table_row: np.ndarray  # [n]
    node_parent: np.ndarray  # [m]
    node_end: np.ndarray  # [m]
    request_node: np.ndarray  # [n]


class Costs(NamedTuple):
    """What the choice of nodes depends on. Bytes are those of one KV head."""

    group: int  # query heads per KV head
    max_tile: int  # rows of the largest tile
    kv_bytes: int  # of one token
    part_bytes: int  # of one query row's partial result, written and read
    task_bytes: int  # that could have been read while a task starts


class Layout(NamedTuple):
    """The chosen nodes, and where query tokens are in gather order. Arrays may be longer."""

    keep: np.ndarray  # bool [m]
    node_start: np.ndarray  # int32 [m]: first position in gather order
    node_tokens: np.ndarray  # int32 [m]: query tokens below
    node_above: np.ndarray  # int32 [m]: nearest kept ancestor, or -1
    node_row: np.ndarray  # int32 [m]: table row of a request below
    request_start: np.ndarray  # int32 [n]: first position in gather order
    request_above: np.ndarray  # int32 [n]: deepest kept node, or -1


# The faults that check_forest returns.
VALID = 0
BAD_PARENT = 1
BAD_NODE_END = 2
BAD_QUERY_LEN = 3
BAD_KV_LEN = 4
BAD_REQUEST_NODE = 5
NODE_IN_QUERIES = 6
BAD_TABLE_ROW = 7


@jit
def check_forest(batch: Batch, max_kv_len: int) -> tuple[int, int]:
    """The first fault of a forest, and the index of the node or request."""
    q_len, kv_len, table_row, node_parent, node_end, request_node = batch
    for node in range(len(node_parent)):
        parent = node_parent[node]
        if parent < -1 or parent >= node:
            return BAD_PARENT, node
        if node_end[node] < (node_end[parent] if parent >= 0 else 0):
            return BAD_NODE_END, node
    for i in range(len(q_len)):
        if q_len[i] < 1:
            return BAD_QUERY_LEN, i
        if kv_len[i] < q_len[i] or kv_len[i] > max_kv_len:
            return BAD_KV_LEN, i
        if table_row[i] < 0:
            return BAD_TABLE_ROW, i
        node = request_node[i]
        if node < -1 or node >= len(node_parent):
            return BAD_REQUEST_NODE, i
        if node >= 0 and node_end[node] > kv_len[i] - q_len[i]:
            return NODE_IN_QUERIES, i
    return VALID, -1


@jit
def count_below(
    batch: Batch, costs: Costs
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Requests and query tokens below each node, and tiles of its own requests."""
    q_len, node_parent, request_node = (
        batch.q_len,
        batch.node_parent,
        batch.request_node,
    )
    group, max_tile = costs.group, costs.max_tile
    requests = np.zeros(len(node_parent), np.int64)
    tokens = np.zeros(len(node_parent), np.int64)
    own_tiles = np.zeros(len(node_parent), np.int64)
    for i in range(len(q_len)):
        node = request_node[i]
        if node >= 0:
            requests[node] += 1
            tokens[node] += q_len[i]
            own_tiles[node] += (q_len[i] * group + max_tile - 1) // max_tile
    for node in range(len(node_parent) - 1, -1, -1):
        parent = node_parent[node]
        if parent >= 0:
            requests[parent] += requests[node]
            tokens[parent] += tokens[node]
    return requests, tokens, own_tiles


@jit
def list_options(
    node_parent: np.ndarray, node_end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Depth of each node, CSR of its options, and the start of the part below.

    Option ``j`` of a node at depth ``k`` (a root has depth 0) names its nearest
    kept ancestor: 0 for none, ``j`` for the one at depth ``j - 1``. For the parts below
    the node, option ``k + 1`` is the node itself.
    """
    num_nodes = len(node_parent)
    depth = np.zeros(num_nodes, np.int64)
    row = np.zeros(num_nodes + 1, np.int64)
    for node in range(num_nodes):
        parent = node_parent[node]
        depth[node] = depth[parent] + 1 if parent >= 0 else 0
        row[node + 1] = row[node] + depth[node] + 2
    starts = np.zeros(row[num_nodes], np.int64)
    for node in range(num_nodes):
        if node_parent[node] >= 0:
            above = row[node_parent[node]]
            for j in range(depth[node] + 1):
                starts[row[node] + j] = starts[above + j]
        starts[row[node] + depth[node] + 1] = node_end[node]
    return depth, row, starts


@jit
def keep_nodes(batch: Batch, costs: Costs, keep: np.ndarray) -> int:
    """Mark the nodes to keep, bool ``[m]``, at the least total cost. Returns their number."""
    node_parent, node_end = batch.node_parent, batch.node_end
    group, max_tile, kv_bytes, part_bytes, task_bytes = costs
    requests, tokens, own_tiles = count_below(batch, costs)
    depth, row, starts = list_options(node_parent, node_end)
    # Cost below each node per option. The end of a suffix adds the same cost to every
    # choice, so it is left out.
    below = np.zeros(len(starts), np.int64)
    choice = np.zeros(len(starts), np.bool_)
    for node in range(len(node_parent)):
        for at in range(row[node], row[node + 1]):
            below[at] = -own_tiles[node] * kv_bytes * starts[at]
    for node in range(len(node_parent) - 1, -1, -1):
        parent = node_parent[node]
        tiles = (tokens[node] * group + max_tile - 1) // max_tile
        fixed = tokens[node] * group * part_bytes + tiles * task_bytes
        fixed += below[row[node + 1] - 1]
        for j in range(depth[node] + 1):
            at = row[node] + j
            kept = fixed + tiles * kv_bytes * (node_end[node] - starts[at])
            choice[at] = requests[node] >= 2 and kept < below[at]
            if parent >= 0:
                below[row[parent] + j] += kept if choice[at] else below[at]

    num_kept = 0
    option = np.zeros(len(node_parent), np.int64)
    for node in range(len(node_parent)):
        parent = node_parent[node]
        if parent >= 0:
            option[node] = depth[node] if keep[parent] else option[parent]
        keep[node] = choice[row[node] + option[node]]
        num_kept += keep[node]
    return num_kept


@jit
def lay_out(batch: Batch, layout: Layout, gather: np.ndarray, rows: np.ndarray) -> None:
    """Order the query tokens so that those below a kept node are contiguous.

    Depth first: a node's children in the order of their indices, then its own requests
    in the batch's order. Requests without a node come last.

    Args:
        layout: ``keep`` is read, the rest is written.
        gather, rows: int32 ``[num_tokens]``, written: the flat token of each position and
            its table row.
    """
    q_len, _, table_row, node_parent, _, request_node = batch
    keep, node_start, node_tokens, node_above, node_row = layout[:5]
    request_start, request_above = layout[5:]
    num_nodes = len(node_parent)
    cursor = np.zeros(num_nodes + 1, np.int64)  # the last one is for no node at all
    for node in range(num_nodes):
        parent = node_parent[node]
        node_tokens[node] = 0
        node_row[node] = 0
        node_above[node] = -1
        if parent >= 0:
            node_above[node] = parent if keep[parent] else node_above[parent]
    for i in range(len(q_len) - 1, -1, -1):
        node = request_node[i]
        if node >= 0 and not keep[node]:
            node = node_above[node]
        request_above[i] = node
        if node >= 0:
            node_tokens[node] += q_len[i]
            node_row[node] = table_row[i]
    for node in range(num_nodes - 1, -1, -1):
        if keep[node] and node_above[node] >= 0:
            node_tokens[node_above[node]] += node_tokens[node]
            node_row[node_above[node]] = node_row[node]
    for node in range(num_nodes):
        if keep[node]:
            node_start[node] = cursor[node_above[node]]
            cursor[node_above[node]] += node_tokens[node]
            cursor[node] = node_start[node]

    token = 0
    for i in range(len(q_len)):
        start = cursor[request_above[i]]
        cursor[request_above[i]] += q_len[i]
        request_start[i] = start
        for j in range(q_len[i]):
            gather[start + j] = token + j
            rows[start + j] = table_row[i]
        token += q_len[i]
