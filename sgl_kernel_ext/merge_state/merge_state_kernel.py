# mypy: ignore-errors
# Triton is untyped, and the arguments of its functions are not Python values.
"""Triton kernels of merge_state. Names: i_ index, o_ offsets, m_ mask, b_ block."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def merge_parts_kernel(
    o_parts_ptr,
    lse_parts_ptr,
    indptr_ptr,
    rows_ptr,
    num_tokens_ptr,
    out_ptr,
    lse_ptr,
    stride_ot,
    stride_oh,
    stride_lt,
    sinks_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Programs stride over the tokens; each merges ``BLOCK_H`` heads of a token."""
    num_tokens = tl.load(num_tokens_ptr)
    for i_token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        i_begin = tl.load(indptr_ptr + i_token)
        i_end = tl.load(indptr_ptr + i_token + 1)
        # A token without parts was written by the attention kernel itself.
        if i_end > i_begin:
            i_row = tl.load(rows_ptr + i_token).to(tl.int64)
            _merge_token(
                o_parts_ptr,
                lse_parts_ptr,
                i_begin,
                i_end,
                out_ptr + i_row * stride_ot,
                lse_ptr + i_row * stride_lt,
                stride_oh,
                sinks_ptr,
                NUM_HEADS,
                HEAD_DIM,
                BLOCK_P,
                BLOCK_H,
                BLOCK_D,
                HAS_LSE,
            )


@triton.jit
def _merge_token(
    o_parts_ptr,
    lse_parts_ptr,
    i_begin,
    i_end,
    out_ptr,
    lse_ptr,
    stride_oh,
    sinks_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    o_head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_dim = tl.arange(0, BLOCK_D)
    m_head = o_head < NUM_HEADS
    m_dim = o_dim < HEAD_DIM

    b_top = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_H], dtype=tl.float32)
    b_acc = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    if sinks_ptr is not None:
        b_top = tl.load(sinks_ptr + o_head, mask=m_head, other=0.0).to(tl.float32)
        b_sum += 1.0
    for i_first in range(i_begin, i_end, BLOCK_P):
        o_part = i_first + tl.arange(0, BLOCK_P)
        # [BLOCK_P, BLOCK_H]
        o_lse = o_part.to(tl.int64)[:, None] * NUM_HEADS + o_head[None, :]
        m_lse = (o_part < i_end)[:, None] & m_head[None, :]
        b_lse = tl.load(lse_parts_ptr + o_lse, mask=m_lse, other=float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_lse, axis=0))
        # While all parts are empty the differences must not be inf - inf.
        b_pivot = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_weight = tl.exp2((b_lse - b_pivot[None, :]) * LOG2E)
        b_scale = tl.exp2((b_top - b_pivot) * LOG2E)
        # [BLOCK_P, BLOCK_H, BLOCK_D]; the values of an empty part are never read.
        o_value = o_lse[:, :, None] * HEAD_DIM + o_dim[None, None, :]
        m_value = (b_lse > float("-inf"))[:, :, None] & m_dim[None, None, :]
        b_value = tl.load(o_parts_ptr + o_value, mask=m_value, other=0.0)
        b_acc = b_acc * b_scale[:, None] + tl.sum(b_weight[:, :, None] * b_value, 0)
        b_sum = b_sum * b_scale + tl.sum(b_weight, axis=0)
        b_top = b_new

    b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    o_out = o_head[:, None] * stride_oh + o_dim[None, :]
    m_out = m_head[:, None] & m_dim[None, :]
    tl.store(out_ptr + o_out, b_out.to(out_ptr.dtype.element_ty), mask=m_out)
    if HAS_LSE:
        b_log = tl.log2(tl.where(b_sum > 0, b_sum, 1.0)) * LN2
        b_lse = tl.where(b_sum > 0, b_top + b_log, float("-inf"))
        tl.store(lse_ptr + o_head, b_lse, mask=m_head)
