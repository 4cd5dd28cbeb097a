"""Checks of batches and tensors. Every error names the value and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from sgl_kernel_ext.shared_prefix_attention import forest, tasks
from sgl_kernel_ext.utils import (
    FLOAT_DTYPES,
    check_device,
    check_dtype,
    check_last_stride,
    check_rows,
    check_shape,
)

if TYPE_CHECKING:
    from sgl_kernel_ext.shared_prefix_attention.attention_plan import AttentionPlan

MAX_HEAD_DIM = 256

_FAULTS = {
    forest.BAD_PARENT: "node_parent[{i}] is {parent}; parents come before children",
    forest.BAD_NODE_END: "node_end[{i}] is {end}, before the end of the node's parent",
    forest.BAD_QUERY_LEN: "q_len[{i}] is {q_len}; every request has a query",
    forest.BAD_KV_LEN: "kv_len[{i}] is {kv_len}; it counts the {q_len} queries too, "
    f"and is below {tasks.NO_CAUSAL}",
    forest.BAD_REQUEST_NODE: "request_node[{i}] is {node}; the forest has {num_nodes} "
    "nodes",
    forest.NODE_IN_QUERIES: "the node of request {i} ends at {node_end}, but the "
    "queries begin at {context}; end the node before them",
    forest.BAD_TABLE_ROW: "table_row[{i}] is {row}; rows count from 0",
}


def check_planner_sizes(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    page_size: int,
    max_tile: int,
) -> None:
    """Raise a ValueError for an attention shape that the kernels do not support."""
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"{num_q_heads} query heads cannot be divided among {num_kv_heads} KV heads"
        )
    if max_tile not in tasks.TILE_ROWS:
        raise ValueError(f"max_tile is {max_tile}; choose one of {tasks.TILE_ROWS}")
    group = num_q_heads // num_kv_heads
    if group > max_tile:
        raise ValueError(
            f"{group} query heads per KV head exceed max_tile = {max_tile}; choose a "
            f"larger one of {tasks.TILE_ROWS}, or more KV heads"
        )
    if not 16 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; supported are 16 to {MAX_HEAD_DIM}")
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype is {dtype}; supported are {FLOAT_DTYPES}")
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; a page holds at least one token")


class TooLarge(ValueError):
    """A batch or its plan does not fit into the planner's buffers."""


def check_limit(name: str, needed: int, available: int) -> None:
    """Raise TooLarge if a buffer is too small, saying by how much."""
    if needed > available:
        raise TooLarge(
            f"the batch has {needed} {name}, the planner holds {available}: "
            f"{needed - available} too few; make it with max_{name} >= {needed}"
        )


def check_batch(
    q_len: np.ndarray,
    kv_len: np.ndarray,
    table_row: np.ndarray,
    node_parent: np.ndarray,
    node_end: np.ndarray,
    request_node: np.ndarray,
) -> None:
    """Raise a ValueError for arrays that do not describe a batch and its forest."""
    _check_arrays(
        q_len=q_len, kv_len=kv_len, table_row=table_row, request_node=request_node
    )
    _check_arrays(node_parent=node_parent, node_end=node_end)
    if len(q_len) == 0:
        raise ValueError("the batch has no requests; there is nothing to plan")
    fault, i = forest.check_forest(
        q_len,
        kv_len,
        table_row,
        node_parent,
        node_end,
        request_node,
        tasks.NO_CAUSAL - 1,
    )
    if fault == forest.VALID:
        return
    facts = {"i": i, "num_nodes": len(node_parent)}
    if fault in (forest.BAD_PARENT, forest.BAD_NODE_END):
        facts |= {"parent": node_parent[i], "end": node_end[i]}
    else:
        facts |= {"q_len": q_len[i], "kv_len": kv_len[i], "row": table_row[i]}
        facts |= {"node": request_node[i], "context": kv_len[i] - q_len[i]}
    if fault == forest.NODE_IN_QUERIES:
        facts |= {"node_end": node_end[request_node[i]]}
    raise ValueError(_FAULTS[fault].format(**facts))


def _check_arrays(**arrays: np.ndarray) -> None:
    first, size = next((name, len(array)) for name, array in arrays.items())
    for name, array in arrays.items():
        if array.dtype != np.int32 or array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError(
                f"{name} is {array.dtype} {list(array.shape)}; pass a contiguous "
                "int32 array of one dimension"
            )
        if len(array) != size:
            raise ValueError(
                f"{name} has {len(array)} entries, {first} has {size}; pass the same number"
            )


def check_run(
    plan: AttentionPlan,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    kv_len: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    lse: torch.Tensor | None,
) -> None:
    """Raise a ValueError for a scale or tensors that do not fit the plan."""
    planner, device = plan.planner, plan.planner.device
    num_kv_heads, head_dim = planner.num_kv_heads, planner.head_dim
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it must be positive")
    if v_cache.shape[-1] != k_cache.shape[-1]:
        raise ValueError(
            f"k_cache has head_dim {k_cache.shape[-1]}, v_cache {v_cache.shape[-1]}; "
            "different head dims are not supported: run them on another kernel"
        )
    check_shape("k_cache", k_cache, None, num_kv_heads, head_dim)
    check_shape("v_cache", v_cache, k_cache.shape[0], num_kv_heads, head_dim)
    for name, queries in (("q", q), ("out", out)):
        check_shape(name, queries, None, planner.num_q_heads, head_dim)
        check_rows(name, queries, plan.num_tokens)
    for name, value in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_dtype(name, value, planner.dtype)
        check_last_stride(name, value)
        check_device(name, value, device)
    check_dtype("out", out, *FLOAT_DTYPES)
    check_last_stride("out", out)
    check_device("out", out, device)
    check_shape("table", table, None, None)
    check_dtype("table", table, torch.int32)
    check_last_stride("table", table)
    check_device("table", table, device)
    check_rows("table", table, plan.max_table_row + 1)
    if table.shape[1] * planner.page_size < plan.max_kv_len:
        raise ValueError(
            f"table has {table.shape[1]} pages of {planner.page_size} tokens per row; a "
            f"request has {plan.max_kv_len} tokens"
        )
    check_shape("kv_len", kv_len, None)
    check_dtype("kv_len", kv_len, torch.int32, torch.int64)
    check_device("kv_len", kv_len, device)
    check_rows("kv_len", kv_len, plan.num_requests)
    check_last_stride("kv_len", kv_len)
    if lse is not None:
        check_shape("lse", lse, None, planner.num_q_heads)
        check_rows("lse", lse, plan.num_tokens)
        check_dtype("lse", lse, torch.float32)
        check_last_stride("lse", lse)
        check_device("lse", lse, device)
