"""A trial of a planner's kernels on their device, before they are used."""

from __future__ import annotations

import numpy as np
import torch

from sgl_kernel_ext.shared_prefix_attention.attention_plan import (
    AttentionPlan,
    AttentionPlanner,
)
from sgl_kernel_ext.shared_prefix_attention.launch import run
from sgl_kernel_ext.shared_prefix_attention.shared_prefix_reference import attention_ref

# Decodes below a long prefix, others below an extension of it, one without a prefix, and
# a chunk of a prompt that fills tiles of every size.
NODE_END = (700, 900)
REQUEST_NODE = (0, 0, 1, 1, 1, -1, 0)
OWN_LEN = (1, 40, 7, 130, 64, 90, 140)
CHUNK = 130
# Largest error relative to the norm of a token's output. Rounding causes less.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def try_out(planner: AttentionPlanner, table_width: int = 0) -> None:
    """Compare ``run`` with PyTorch on a small batch, and in a CUDA graph on a GPU.

    Compiles the kernel for the planner's shape and for int64 lengths. Invalidates the
    planner's earlier plans.

    Args:
        table_width: pages per row of the table that will be used. The kernel is
            compiled for the divisibility of the table's stride.

    Raises:
        RuntimeError: the results differ from attention.
        Exception: any error of the compiler or the driver.
    """
    random = torch.Generator().manual_seed(0)
    # Prefixes end where pages do.
    node_end = np.array(NODE_END, np.int32) // planner.page_size * planner.page_size
    q_len, kv_len, nodes = _batch(planner, node_end)
    pages = _pages(kv_len, nodes, node_end // planner.page_size, planner.page_size)
    width = max(table_width, pages.shape[1])
    table = torch.zeros(len(pages), width, dtype=torch.int32, device=planner.device)
    table[:, : pages.shape[1]] = pages.to(planner.device)
    num_slots = (int(table.max()) + 1) * planner.page_size

    def values(rows: int, heads: int) -> torch.Tensor:
        shape = (rows, heads, planner.head_dim)
        made = torch.randn(shape, generator=random)
        return made.to(planner.device, planner.dtype)

    q = values(int(q_len.sum()), planner.num_q_heads)
    k_cache, v_cache = (values(num_slots, planner.num_kv_heads) for _ in range(2))
    lengths = torch.from_numpy(kv_len).long().to(planner.device)
    rows = np.arange(len(q_len), dtype=np.int32)
    forest = np.array([-1, 0], np.int32), node_end
    scale = planner.head_dim**-0.5
    wanted, _ = attention_ref(
        q, k_cache, v_cache, table, q_len.tolist(), kv_len.tolist(), rows.tolist(),
        planner.page_size, scale,
    )  # fmt: skip
    out = torch.empty_like(q)

    def launch(plan: AttentionPlan, grid: int | None) -> None:
        run(plan, q, k_cache, v_cache, table, lengths, out, scale, grid=grid)

    for request_node in (nodes, np.full_like(nodes, -1)):
        plan = planner.plan(q_len, kv_len, rows, *forest, request_node)
        for grid in (None, planner.fixed_grid):
            out.fill_(torch.nan)
            launch(plan, grid)
            _compare(out, wanted, f"a grid of {grid or 'one program per work item'}")
    if planner.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(plan, planner.fixed_grid)
        planner.plan(q_len, kv_len, rows, *forest, nodes)
        out.fill_(torch.nan)
        graph.replay()
        _compare(out, wanted, "a CUDA graph whose plan has changed")


def _batch(
    planner: AttentionPlanner, node_end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Query lengths, KV lengths and nodes of the most requests the planner takes."""
    count = min(len(OWN_LEN), planner.max_requests)
    q_len = np.ones(count, np.int32)
    if count == len(OWN_LEN) and planner.max_tokens >= count - 1 + CHUNK:
        q_len[-1] = CHUNK
    nodes = np.array(REQUEST_NODE[:count], np.int32)
    shared = np.where(nodes >= 0, node_end[nodes], 0)
    return q_len, (shared + OWN_LEN[:count]).astype(np.int32), nodes


def _pages(
    kv_len: np.ndarray, nodes: np.ndarray, node_pages: np.ndarray, page_size: int
) -> torch.Tensor:
    """int32 ``[requests, pages]``: scattered pages, shared within a prefix."""
    count, width = len(kv_len), -(-int(kv_len.max()) // page_size)
    order = np.random.default_rng(0).permutation((count + len(node_pages)) * width)
    pages = order.astype(np.int32).reshape(-1, width)
    table = pages[:count]
    begin = 0
    for node, end in enumerate(node_pages):
        table[nodes >= node, begin:end] = pages[count + node, begin:end]
        begin = end
    return torch.from_numpy(table.copy())


def _compare(out: torch.Tensor, wanted: torch.Tensor, how: str) -> None:
    error = (out.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    worst = float(error.max())
    if not worst <= TOLERANCE[out.dtype]:  # NaN, too
        raise RuntimeError(
            f"with {how}, attention of shared prefixes differs from PyTorch's by "
            f"{worst:.2g} of its norm (at most {TOLERANCE[out.dtype]:.2g} is rounding)"
        )
