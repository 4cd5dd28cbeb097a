"""Runs a plan: a launch for the work items of each tile, and one for the merge."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sgl_kernel_ext.merge_state import merge_parts
from sgl_kernel_ext.shared_prefix_attention.attention_plan import AttentionPlan
from sgl_kernel_ext.shared_prefix_attention.shared_prefix_kernel import (
    shared_prefix_attention_kernel,
)
from sgl_kernel_ext.shared_prefix_attention.tasks import TILE_ROWS
from sgl_kernel_ext.utils import (
    FLOAT_DTYPES,
    check_runnable,
    check_tensor,
)

# Programs of the merge per multiprocessor if the grid is fixed.
MERGE_PROGRAMS_PER_SM = 8


# q, k_cache, v_cache, table, kv_len and out of :func:`run`.
Tensors = tuple[torch.Tensor, ...]


class Features(NamedTuple):
    """What a layer's attention has beside ``softmax(scale * q k) v``.

    logit_cap: a logit ``l`` becomes ``logit_cap * tanh(l / logit_cap)``. 0 for none.
    sinks: ``[num_q_heads]``, a logit that each head attends to beside the tokens, with a
        value of zero. It counts in the lse. None for none.
    v_scale: factor of the values of a quantised cache. That of its keys is part of the
        scale.
    """

    logit_cap: float = 0.0
    sinks: torch.Tensor | None = None
    v_scale: float = 1.0


PLAIN = Features()


def run(
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
    grid: Sequence[int] | None = None,
) -> None:
    """Attention of one layer for a planned batch.

    Slot of position ``p`` of a request: ``table[row, p // page_size] * page_size +
    p % page_size``. All tensors are on the planner's device, and their last dimension
    is contiguous.

    Args:
        plan: the newest plan of its planner, for the planned lengths or any for which
            it is ``still_valid``.
        q: ``[at least num_tokens, num_q_heads, head_dim]`` in the batch's order.
        k_cache: ``[num_slots, num_kv_heads, head_dim]``, of the planner's ``kv_dtype``.
        v_cache: ``[num_slots, num_kv_heads, v_head_dim]``, of the same type. With latents,
            ``k_cache[..., :v_head_dim]``.
        table: int32 ``[rows, max_pages]``.
        kv_len: int32 or int64 ``[at least num_requests]``, the KV lengths now. A decode
            ends there, a chunk at its planned length.
        out: ``[at least num_tokens, num_q_heads, v_head_dim]``, written. Rows from
            num_tokens on are not changed.
        scale: factor of the logits, positive.
        features: of the layer. The kernel is compiled for the value of the cap.
        lse: float32 ``[at least num_tokens, num_q_heads]``, written, natural log.
        grid: programs for each of the three tiles, by default one per work item. Use
            ``planner.fixed_grid`` for a launch that a CUDA graph captures.

    Raises:
        ValueError: for a scale, shape, dtype, stride or device not supported.
    """
    tensors = (q, k_cache, v_cache, table, kv_len, out)
    check_run(plan, tensors, scale, lse, features)
    check_runnable(shared_prefix_attention_kernel, q.device, "run_reference")
    planner = plan.planner
    every = [count * planner.num_kv_heads for count in plan.tile_tasks]
    attend(every if grid is None else grid, plan, tensors, scale, lse, features)
    if grid is not None or plan.num_parts > 0:
        most = MERGE_PROGRAMS_PER_SM * planner.config.num_sms
        merge_parts(
            planner.workspace.o_parts,
            planner.workspace.lse_parts,
            planner.buffers.part_indptr,
            planner.buffers.gather,
            planner.buffers.num_tokens,
            out,
            lse,
            num_programs=plan.num_tokens
            if grid is None
            else min(most, planner.max_tokens),
            sinks=features.sinks,
        )


def attend(
    grid: Sequence[int],
    plan: AttentionPlan,
    tensors: Tensors,
    scale: float,
    lse: torch.Tensor | None,
    features: Features = PLAIN,
) -> None:
    """Launch the attention of the plan's tasks, without the merge of their parts.

    In a CUDA graph the launches of the tiles are branches that join at the end.
    """
    planner = plan.planner
    q, k_cache, v_cache, table, kv_len, out = tensors
    buffers, workspace, tiles = planner.buffers, planner.workspace, planner.config.tiles
    # Wide tiles, whose items take longest, come first. All write to places of their own.
    used = [tile for tile in (2, 1, 0) if grid[tile]]
    sides: list[torch.cuda.Stream] = []
    if planner.side_streams and torch.cuda.is_current_stream_capturing():
        sides = planner.side_streams[: len(used) - 1]
    for tile, side in itertools.zip_longest(used, sides):
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            shared_prefix_attention_kernel[(grid[tile],)](
                buffers.header,
                buffers.tasks,
                buffers.gather,
                buffers.rows,
                buffers.part_indptr,
                q,
                k_cache,
                v_cache,
                table,
                kv_len,
                out,
                workspace.lse_parts if lse is None else lse,
                workspace.o_parts,
                workspace.lse_parts,
                scale * math.log2(math.e),
                *q.stride()[:2],
                *k_cache.stride()[:2],
                *v_cache.stride()[:2],
                table.stride(0),
                *out.stride()[:2],
                0 if lse is None else lse.stride(0),
                features.sinks,
                features.v_scale if planner.quantised else None,
                NUM_Q_HEADS=planner.num_q_heads,
                NUM_KV_HEADS=planner.num_kv_heads,
                HEAD_DIM=planner.head_dim,
                V_DIM=planner.v_head_dim,
                LATENT=planner.latent,
                BLOCK_D=planner.blocks[0],
                BLOCK_V=planner.blocks[1],
                PAGE_SIZE=planner.page_size,
                TILE=tile,
                BLOCK_M=TILE_ROWS[tile],
                BLOCK_N=tiles.block_n[tile],
                STAGES=tiles.num_stages[tile],
                HAS_LSE=lse is not None,
                LOGIT_CAP=float(features.logit_cap),
                PRECISION=dot_precision(planner.dtype, planner.device),
                num_warps=tiles.num_warps[tile],
            )
    for side in sides:
        torch.cuda.current_stream().wait_stream(side)


def dot_precision(dtype: torch.dtype, device: torch.device) -> str:
    """Triton's input_precision: three tensor core products for float32 on NVIDIA."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return "tf32x3" if nvidia and dtype == torch.float32 else "ieee"


def check_run(
    plan: AttentionPlan,
    tensors: Tensors,
    scale: float,
    lse: torch.Tensor | None,
    features: Features,
) -> None:
    """Raise a ValueError for a scale, features or tensors that do not fit the plan."""
    planner, device = plan.planner, plan.planner.device
    q, k_cache, v_cache, table, kv_len, out = tensors
    heads, kv_heads = planner.num_q_heads, planner.num_kv_heads
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it must be positive")
    if not 0 <= features.logit_cap < math.inf:
        raise ValueError(f"logit_cap is {features.logit_cap}; give 0 for no cap")
    if features.v_scale != 1.0 and not (planner.quantised and features.v_scale > 0):
        raise ValueError(
            f"v_scale is {features.v_scale} with a cache of {planner.kv_dtype}; give 1, "
            "or a positive one with a cache of fp8"
        )
    own, kept, int32 = (planner.dtype,), (planner.kv_dtype,), (torch.int32,)
    k_dim, v_dim = planner.head_dim, planner.v_head_dim
    check_tensor("k_cache", k_cache, (None, kv_heads, k_dim), kept, device)
    check_tensor("v_cache", v_cache, (len(k_cache), kv_heads, v_dim), kept, device)
    if planner.latent and (k_cache.data_ptr(), *k_cache.stride()) != (
        v_cache.data_ptr(),
        *v_cache.stride(),
    ):
        raise ValueError(
            "v_cache is not in the memory of k_cache; with latents, pass "
            f"k_cache[..., :{v_dim}]"
        )
    check_tensor("q", q, (None, heads, k_dim), own, device, plan.num_tokens)
    check_tensor(
        "out", out, (None, heads, v_dim), FLOAT_DTYPES, device, plan.num_tokens
    )
    rows = plan.max_table_row + 1
    check_tensor("table", table, (None, None), int32, device, rows)
    if table.shape[1] * planner.page_size < plan.max_kv_len:
        raise ValueError(
            f"table has {table.shape[1]} pages of {planner.page_size} tokens per row; a "
            f"request has {plan.max_kv_len} tokens"
        )
    lengths = torch.int32, torch.int64
    check_tensor("kv_len", kv_len, (None,), lengths, device, plan.num_requests)
    if features.sinks is not None:
        check_tensor("sinks", features.sinks, (heads,), FLOAT_DTYPES, device)
    if lse is not None:
        float32 = (torch.float32,)
        check_tensor("lse", lse, (None, heads), float32, device, plan.num_tokens)
