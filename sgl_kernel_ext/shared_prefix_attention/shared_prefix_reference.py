"""Shared-prefix attention in plain PyTorch.

``attention_ref`` uses no plan and is the reference for all tests. ``run_reference`` executes a
plan's tasks, for machines without a GPU. ``try_out`` compares a planner's kernels with them
on their device before they are used.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from sgl_kernel_ext.merge_state import merge_parts_ref, with_sinks
from sgl_kernel_ext.shared_prefix_attention import tasks
from sgl_kernel_ext.shared_prefix_attention.attention_plan import (
    AttentionPlan,
    AttentionPlanner,
)
from sgl_kernel_ext.shared_prefix_attention.launch import (
    PLAIN,
    Features,
    check_run,
    run,
)


def attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    q_len: list[int],
    kv_len: list[int],
    table_row: list[int],
    page_size: int,
    scale: float,
    features: Features = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request over all of its KV, in float32.

    Args:
        q: ``[num_tokens, num_q_heads, head_dim]``.
        k_cache, v_cache: ``[num_slots, num_kv_heads, head_dim]``, of sizes of their own.
        table: int32 ``[rows, max_pages]``.
        q_len, kv_len, table_row: per request, as in ``AttentionPlanner.plan``.

    Returns:
        The output ``[num_tokens, num_q_heads, v_head_dim]`` and the natural lse
        ``[num_tokens, num_q_heads]``, both float32.
    """
    outs, lses = [], []
    start = 0
    for queries, length, row in zip(q_len, kv_len, table_row, strict=True):
        b_q = q[start : start + queries].float()
        slots = _slots(table, row, 0, length, page_size)
        group = q.shape[1] // k_cache.shape[1]
        b_k = k_cache[slots].float().repeat_interleave(group, dim=1)
        b_v = v_cache[slots].float().repeat_interleave(group, dim=1) * features.v_scale
        logits = torch.einsum("qhd,khd->hqk", b_q, b_k) * scale
        if features.logit_cap:
            logits = (logits / features.logit_cap).tanh() * features.logit_cap
        own = torch.arange(length - queries, length, device=q.device)
        seen = torch.arange(length, device=q.device)[None, :] <= own[:, None]
        logits = logits.masked_fill(~seen, -torch.inf)
        if features.sinks is not None:
            sinks = features.sinks.float()[:, None, None].expand(-1, queries, 1)
            logits = torch.cat([logits, sinks], -1)
        weights = logits.softmax(-1)[..., :length]
        outs.append(torch.einsum("hqk,khd->qhd", weights, b_v))
        lses.append(logits.logsumexp(-1).T)
        start += queries
    return torch.cat(outs), torch.cat(lses)


def run_reference(
    plan: AttentionPlan,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    kv_len: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    *,
    features: Features = PLAIN,
    lse: torch.Tensor | None = None,
) -> None:
    """Execute a plan task by task, each a few batched matrix products in float32. Arguments
    and errors are those of ``run``.
    """
    check_run(plan, (q, k_cache, v_cache, table, kv_len, out), scale, lse, features)
    workspace = plan.planner.workspace
    gather = torch.from_numpy(plan.gather).long().to(q.device)
    indptr = torch.from_numpy(plan.part_indptr).to(q.device)
    first_part = indptr.long()
    lengths = kv_len.tolist()
    for task in _without_packing(plan):
        start, count = task[tasks.START], task[tasks.COUNT]
        part_out, part_lse = _attend(
            task,
            q[gather[start : start + count]],
            k_cache,
            v_cache,
            table,
            lengths,
            plan.planner.page_size,
            scale,
            features,
        )
        if task[tasks.PART] < 0:
            part_out, part_lse = with_sinks(part_out, part_lse, features.sinks)
            rows = gather[start : start + count]
            out[rows] = part_out.to(out.dtype)
            if lse is not None:
                lse[rows] = part_lse
        else:
            slots = first_part[start : start + count] + task[tasks.PART]
            workspace.o_parts[slots] = part_out
            workspace.lse_parts[slots] = part_lse
    parts = workspace.o_parts, workspace.lse_parts
    merge_parts_ref(*parts, indptr, gather, out, lse, features.sinks)


def _without_packing(plan: AttentionPlan) -> Iterator[list[int]]:
    """The tasks, those of packed suffixes as one for each request."""
    for task in plan.task_table.tolist():
        if task[tasks.TAIL_OF] != tasks.PACKED:
            yield task
            continue
        for place in range(task[tasks.START], task[tasks.START] + task[tasks.COUNT]):
            own = task.copy()
            own[tasks.START], own[tasks.COUNT] = place, 1
            own[tasks.TABLE_ROW] = int(plan.rows[place])
            own[tasks.TAIL_OF] = int(plan.gather[place])
            yield own


def _attend(
    task: list[int],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    lengths: list[int],
    page_size: int,
    scale: float,
    features: Features,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[count, num_q_heads, v_head_dim]`` and lse of one task, float32."""
    count, num_heads, head_dim = q.shape
    v_head_dim = v_cache.shape[-1]
    begin, end = task[tasks.KV_BEGIN], task[tasks.KV_END]
    if task[tasks.TAIL_OF] >= 0:
        end = lengths[task[tasks.TAIL_OF]]
    if end <= begin:
        empty = torch.zeros(count, num_heads, v_head_dim, device=q.device)
        return empty, torch.full_like(empty[..., 0], -torch.inf)
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    slots = _slots(table, task[tasks.TABLE_ROW], begin, end, page_size)
    # [num_kv_heads, count * group, head_dim]: a row per token and head of the group
    b_q = q.float().view(count, num_kv_heads, group, head_dim).transpose(0, 1)
    b_q = b_q.reshape(num_kv_heads, count * group, head_dim)
    b_k = k_cache[slots].float().permute(1, 2, 0)
    b_v = v_cache[slots].float().transpose(0, 1)
    logits = torch.bmm(b_q * scale, b_k)
    if features.logit_cap:
        logits.div_(features.logit_cap).tanh_().mul_(features.logit_cap)
    first = task[tasks.FIRST_POSITION]
    if first != tasks.NO_CAUSAL:
        own = first + torch.arange(count, device=q.device).repeat_interleave(group)
        seen = torch.arange(begin, end, device=q.device)[None, :] <= own[:, None]
        logits.masked_fill_(~seen, -torch.inf)
    top = logits.amax(-1, keepdim=True)
    top.masked_fill_(top == -torch.inf, 0.0)
    weights = logits.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = (top + total.log()).view(num_kv_heads, count, group).transpose(0, 1)
    out = torch.bmm(weights, b_v) / total.masked_fill(total == 0, 1.0)
    out *= features.v_scale
    out = out.view(num_kv_heads, count, group, v_head_dim).transpose(0, 1)
    return out.reshape(count, num_heads, v_head_dim), lse.reshape(count, num_heads)


def _slots(
    table: torch.Tensor, row: int, begin: int, end: int, page_size: int
) -> torch.Tensor:
    """Cache slots of the positions ``begin`` to ``end`` of a table row, int64."""
    if page_size == 1:
        return table[row, begin:end].long()
    position = torch.arange(begin, end, device=table.device)
    page = table[row].long()[position // page_size]
    return page * page_size + position % page_size


# Decodes below a long prefix, others below an extension of it, one without a prefix, and
# a chunk of a prompt that fills tiles of every size.
NODE_END = (700, 900)
REQUEST_NODE = (0, 0, 1, 1, 1, -1, 0)
OWN_LEN = (1, 40, 7, 130, 64, 90, 140)
CHUNK = 130
# Largest error relative to the norm of a token's output. Rounding causes less.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def try_out(
    planner: AttentionPlanner, table_width: int = 0, features: Features = PLAIN
) -> None:
    """Compare ``run`` with PyTorch on a small batch, and in a CUDA graph on a GPU.

    Compiles the kernel for the planner's shape and for int64 lengths. Invalidates the
    planner's earlier plans.

    Args:
        table_width: pages per row of the table that will be used. The kernel is
            compiled for the divisibility of the table's stride.
        features: of the layers that the kernel will run.

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

    def values(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype).to(planner.device)

    q_shape = int(q_len.sum()), planner.num_q_heads, planner.head_dim
    q = values(*q_shape, dtype=planner.dtype)
    cache, v_dim = (num_slots, planner.num_kv_heads), planner.v_head_dim
    k_cache = values(*cache, planner.head_dim, dtype=planner.kv_dtype)
    v_cache = k_cache[..., :v_dim]
    if not planner.latent:
        v_cache = values(*cache, v_dim, dtype=planner.kv_dtype)
    if planner.quantised:
        features = features._replace(v_scale=0.5)
    lengths = torch.from_numpy(kv_len).long().to(planner.device)
    rows = np.arange(len(q_len), dtype=np.int32)
    forest = np.array([-1, 0], np.int32), node_end
    scale = planner.head_dim**-0.5
    wanted, _ = attention_ref(
        q, k_cache, v_cache, table, q_len.tolist(), kv_len.tolist(), rows.tolist(),
        planner.page_size, scale, features,
    )  # fmt: skip
    out = q.new_empty(*q_shape[:2], v_dim)

    def launch(plan: AttentionPlan, grid: tuple[int, ...] | None) -> None:
        tensors = q, k_cache, v_cache, table, lengths, out
        run(plan, *tensors, scale, features=features, grid=grid)

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
    if count == len(OWN_LEN):
        q_len[-1] = min(CHUNK, planner.max_tokens - count + 1)
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
