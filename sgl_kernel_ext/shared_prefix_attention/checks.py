"""Checks of planners and batches. Every error names the value and the way out."""

from __future__ import annotations

import numpy as np
import torch

from sgl_kernel_ext.shared_prefix_attention import forest, tasks
from sgl_kernel_ext.utils import FLOAT_DTYPES

MAX_HEAD_DIM = 512
QUANTISED_DTYPES = (torch.float8_e4m3fn,)

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
    v_head_dim: int,
    latent: bool,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
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
    if latent and v_head_dim >= head_dim:
        raise ValueError(
            f"v_head_dim is {v_head_dim}; with latents, K has head_dim = {head_dim} "
            "values, and V the first of them"
        )
    for name, size in {
        "head_dim": head_dim - v_head_dim if latent else head_dim,
        "v_head_dim": v_head_dim,
    }.items():
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name} is {size}; supported are 1 to {MAX_HEAD_DIM}")
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype is {dtype}; supported are {FLOAT_DTYPES}")
    if kv_dtype not in (dtype, *QUANTISED_DTYPES):
        raise ValueError(
            f"kv_dtype is {kv_dtype}; supported are {dtype} and {QUANTISED_DTYPES}"
        )
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


def check_batch(batch: forest.Batch) -> None:
    """Raise a ValueError for arrays that do not describe a batch and its forest."""
    q_len, kv_len, table_row, node_parent, node_end, request_node = batch
    _check_arrays(
        q_len=q_len, kv_len=kv_len, table_row=table_row, request_node=request_node
    )
    _check_arrays(node_parent=node_parent, node_end=node_end)
    if len(q_len) == 0:
        raise ValueError("the batch has no requests; there is nothing to plan")
    fault, i = forest.check_forest(batch, tasks.NO_CAUSAL - 1)
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
