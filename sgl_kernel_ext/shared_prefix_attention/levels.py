"""A plan in the form that kernels need which attend level by level.

A level is one attention call over all query tokens. It divides the tokens, in gather
order, into ranges. Every range reads one span of KV positions of one table row. Kept
nodes with the same number of kept nodes above them share a level. The last level has
the suffix of each request, after its deepest kept node:

    tokens in gather order   0 ......................... num_tokens
    level 0, roots           | node 0            | node 1  | empty |
    level 1, below them      | node 2  | empty                     |
    last level, suffixes     | r4 | r1 | r0 | r6 | r2 | r5 | r3    |

The spans of a token in all levels cover each of its KV positions once. Only the last
level needs a causal mask, where a token attends to no position after its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sgl_kernel_ext.shared_prefix_attention.attention_plan import AttentionPlan


class Level(NamedTuple):
    """Ranges of query tokens and the KV that each reads, int32, on the host.

    Range ``i`` has the tokens ``token_indptr[i]`` to ``token_indptr[i + 1]`` in gather
    order. The ranges cover all tokens of the plan. A range reads the positions
    ``kv_begin[i]`` to ``kv_end[i]`` of the table row ``table_row[i]``. Tokens without
    a node in this level are in ranges with an empty span of row 0.
    """

    token_indptr: np.ndarray  # [s + 1]
    table_row: np.ndarray  # [s]
    kv_begin: np.ndarray  # [s]
    kv_end: np.ndarray  # [s]


def cascade_levels(
    plan: AttentionPlan,
    q_len: np.ndarray,
    kv_len: np.ndarray,
    table_row: np.ndarray,
    node_end: np.ndarray,
) -> list[Level]:
    """The levels of a plan, from the roots to the suffixes. There is at least one.

    Args:
        plan: the newest plan of its planner, whose buffers are read.
        q_len, table_row, node_end: as planned.
        kv_len: int32 ``[n]``, the planned KV lengths, or any for which the plan is
            ``still_valid``.
    """
    own = plan.planner.buffers
    num_nodes = len(node_end)
    # Index -1 is for no node.
    ends = np.zeros(num_nodes + 1, np.int32)
    ends[:num_nodes] = node_end
    done = np.zeros(num_nodes + 1, np.bool_)
    done[-1] = True
    left = np.flatnonzero(own.keep[:num_nodes])
    levels = []
    while len(left):
        ready = done[own.node_above[left]]
        nodes, left = left[ready], left[~ready]
        done[nodes] = True
        levels.append(_node_level(plan, nodes, ends))
    levels.append(_suffix_level(plan, q_len, kv_len, table_row, ends))
    return levels


def _node_level(plan: AttentionPlan, nodes: np.ndarray, ends: np.ndarray) -> Level:
    """The given nodes, none above another, with empty ranges between them."""
    own = plan.planner.buffers
    starts = own.node_start[nodes]
    stops = starts + own.node_tokens[nodes]
    outer = np.array([0, plan.num_tokens], np.int32)
    token_indptr = np.unique(np.concatenate([outer, starts, stops]))
    at = np.searchsorted(token_indptr, starts)
    level = Level(token_indptr, *np.zeros((3, len(token_indptr) - 1), np.int32))
    level.table_row[at] = own.node_row[nodes]
    level.kv_begin[at] = ends[own.node_above[nodes]]
    level.kv_end[at] = ends[nodes]
    return level


def _suffix_level(
    plan: AttentionPlan,
    q_len: np.ndarray,
    kv_len: np.ndarray,
    table_row: np.ndarray,
    ends: np.ndarray,
) -> Level:
    """One range per request, in gather order."""
    own = plan.planner.buffers
    order = np.argsort(own.request_start[: plan.num_requests])
    token_indptr = np.zeros(plan.num_requests + 1, np.int32)
    np.cumsum(q_len[order], dtype=np.int32, out=token_indptr[1:])
    begins = ends[own.request_above[order]]
    return Level(token_indptr, table_row[order], begins, kv_len[order])
