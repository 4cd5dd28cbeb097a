# mypy: ignore-errors
# Triton is untyped, and the arguments of its functions are not Python values.
"""The attention kernel: one program per work item, a work item per task and KV head.

Names: i_ index, o_ offsets, m_ mask, b_ block, p_ pointer. Logits are kept in base 2:
they are multiplied by scale x log2(e) and exponentiated with exp2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sgl_kernel_ext.shared_prefix_attention import attention_plan, tasks

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
HEADER_TASKS = tl.constexpr(attention_plan.HEADER_TASKS)
NUM_FIELDS = tl.constexpr(tasks.NUM_FIELDS)
START = tl.constexpr(tasks.START)
COUNT = tl.constexpr(tasks.COUNT)
KV_BEGIN = tl.constexpr(tasks.KV_BEGIN)
KV_END = tl.constexpr(tasks.KV_END)
TABLE_ROW = tl.constexpr(tasks.TABLE_ROW)
FIRST_POSITION = tl.constexpr(tasks.FIRST_POSITION)
TAIL_OF = tl.constexpr(tasks.TAIL_OF)
PART = tl.constexpr(tasks.PART)
PACKED = tl.constexpr(tasks.PACKED)


@triton.jit
def shared_prefix_attention_kernel(
    header_ptr,
    tasks_ptr,
    gather_ptr,
    rows_ptr,
    indptr_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    kv_len_ptr,
    out_ptr,
    lse_ptr,
    o_parts_ptr,
    lse_parts_ptr,
    scale_log2,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_table,
    stride_ot,
    stride_oh,
    stride_lt,
    sinks_ptr,
    v_scale,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_LSE: tl.constexpr,
    LOGIT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The tasks of one tile. Programs stride over the work items; any grid gives the same."""
    i_first = tl.load(header_ptr + HEADER_TASKS + TILE)
    num_items = (tl.load(header_ptr + HEADER_TASKS + TILE + 1) - i_first) * NUM_KV_HEADS
    for i_item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        i_kv_head = tl.full([], 0, tl.int64) + i_item % NUM_KV_HEADS
        _attend(
            tasks_ptr + (i_first + i_item // NUM_KV_HEADS) * NUM_FIELDS,
            gather_ptr, rows_ptr, indptr_ptr, i_kv_head,
            q_ptr, k_ptr + i_kv_head * stride_kh, v_ptr + i_kv_head * stride_vh,
            table_ptr, kv_len_ptr, out_ptr, lse_ptr, o_parts_ptr, lse_parts_ptr,
            scale_log2, stride_qt, stride_qh, stride_kt, stride_vt, stride_table,
            stride_ot, stride_oh, stride_lt, sinks_ptr, v_scale,
            NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, V_DIM, LATENT, BLOCK_D, BLOCK_V,
            PAGE_SIZE, BLOCK_M, BLOCK_N, STAGES, HAS_LSE, LOGIT_CAP, PRECISION,
        )  # fmt: skip


@triton.jit
def _attend(
    p_task,
    gather_ptr,
    rows_ptr,
    indptr_ptr,
    i_kv_head,
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    kv_len_ptr,
    out_ptr,
    lse_ptr,
    o_parts_ptr,
    lse_parts_ptr,
    scale_log2,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_vt,
    stride_table,
    stride_ot,
    stride_oh,
    stride_lt,
    sinks_ptr,
    v_scale,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_LSE: tl.constexpr,
    LOGIT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One task and KV head in a tile of ``BLOCK_M`` rows.

    In wide tiles the blocks that need no mask have a loop of their own. That saves
    arithmetic. A tile that spends its time on reading KV is faster with one loop,
    which fills its pipeline once.

    Where K and V are latents, V is the first ``V_DIM`` values of K, and those are read once.

    A tile of 16 rows may hold packed suffixes of several requests. Its loop goes on from the
    last block of one request to the first of the next.
    """
    PACKS: tl.constexpr = BLOCK_M == 16
    TWO_LOOPS: tl.constexpr = BLOCK_M == 128
    GROUP: tl.constexpr = NUM_Q_HEADS // NUM_KV_HEADS
    # The values of K that are not V too.
    KEY_DIM: tl.constexpr = HEAD_DIM - V_DIM if LATENT else HEAD_DIM
    i_start = tl.load(p_task + START)
    num_rows = tl.load(p_task + COUNT) * GROUP
    i_begin = tl.load(p_task + KV_BEGIN)
    i_end = tl.load(p_task + KV_END)
    i_position = tl.load(p_task + FIRST_POSITION)
    i_tail_of = tl.load(p_task + TAIL_OF)
    i_part = tl.load(p_task + PART)
    i_table_row = tl.load(p_task + TABLE_ROW)
    if i_tail_of >= 0:
        i_end = tl.load(kv_len_ptr + i_tail_of).to(tl.int32)

    # Row m of the tile is query head m % GROUP of the token m // GROUP.
    o_row = tl.arange(0, BLOCK_M)
    m_row = o_row < num_rows
    o_gather = i_start + o_row // GROUP
    o_head = i_kv_head * GROUP + o_row % GROUP
    o_token = tl.load(gather_ptr + o_gather, mask=m_row, other=0).to(tl.int64)
    o_dim = HEAD_DIM - KEY_DIM + tl.arange(0, BLOCK_D)
    m_q = m_row[:, None] & (o_dim < HEAD_DIM)[None, :]
    o_value = tl.arange(0, BLOCK_V)
    m_out = m_row[:, None] & (o_value < V_DIM)[None, :]
    p_q = q_ptr + (o_token * stride_qt + o_head * stride_qh)[:, None]
    # [BLOCK_M, BLOCK_D], and [BLOCK_M, BLOCK_V] for the values of K that are V too
    b_q = tl.load(p_q + o_dim[None, :], mask=m_q, other=0.0)
    b_q_latent = b_q
    if LATENT:
        b_q_latent = tl.load(p_q + o_value[None, :], mask=m_out, other=0.0)

    # The first KV position after those that a row attends to.
    b_limit = tl.minimum(i_position + 1 + o_row // GROUP, i_end)
    # Of the row's request in a packed task: where the loop's count reaches it, and its table row.
    b_first = tl.full([BLOCK_M], 0, tl.int32) + i_begin
    b_row = tl.full([BLOCK_M], 0, tl.int32) + i_table_row
    if PACKS:  # noqa: SIM102 - decided when compiling
        if i_tail_of == PACKED:
            b_len = tl.load(kv_len_ptr + o_token, mask=m_row, other=0).to(tl.int32)
            b_len = tl.where(m_row, b_len - i_begin, 0)
            b_blocks = tl.where(o_row % GROUP == 0, tl.cdiv(b_len, BLOCK_N), 0)
            b_next = i_begin + tl.cumsum(b_blocks, axis=0) * BLOCK_N
            b_first = b_next - tl.cdiv(b_len, BLOCK_N) * BLOCK_N
            b_limit = b_first + b_len
            b_row = tl.load(rows_ptr + o_gather, mask=m_row, other=0)
            i_end = tl.max(b_limit, axis=0)
    b_top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102 - decided when compiling
        # The sinks of a token with several parts come in when they are merged.
        if i_part < 0:
            b_top = tl.load(sinks_ptr + o_head).to(tl.float32) * LOG2E
            b_sum += 1.0
    b_acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    i_masked = i_begin
    if TWO_LOOPS:
        num_clear = tl.maximum(tl.minimum(i_position + 1, i_end) - i_begin, 0)
        i_masked = i_begin + num_clear // BLOCK_N * BLOCK_N
        for i_block in tl.range(i_begin, i_masked, BLOCK_N, num_stages=STAGES):
            b_top, b_sum, b_acc = _step(
                b_q, b_q_latent, b_top, b_sum, b_acc, b_first, b_limit, b_row,
                i_begin, i_block, i_end, i_table_row,
                k_ptr, v_ptr, table_ptr, scale_log2, stride_kt, stride_vt, stride_table,
                V_DIM, LATENT, KEY_DIM, BLOCK_D, BLOCK_V, PAGE_SIZE, BLOCK_N,
                False, False, LOGIT_CAP, PRECISION,
            )  # fmt: skip
    for i_block in tl.range(i_masked, i_end, BLOCK_N, num_stages=STAGES):
        b_top, b_sum, b_acc = _step(
            b_q, b_q_latent, b_top, b_sum, b_acc, b_first, b_limit, b_row,
            i_begin, i_block, i_end, i_table_row,
            k_ptr, v_ptr, table_ptr, scale_log2, stride_kt, stride_vt, stride_table,
            V_DIM, LATENT, KEY_DIM, BLOCK_D, BLOCK_V, PAGE_SIZE, BLOCK_N,
            True, PACKS, LOGIT_CAP, PRECISION,
        )  # fmt: skip

    # A row without any position has sum 0, so output 0 and lse -inf.
    b_seen = b_sum > 0
    b_divisor = tl.where(b_seen, b_sum, 1.0)
    b_out = b_acc / b_divisor[:, None]
    if v_scale is not None:
        b_out *= v_scale
    b_lse = tl.where(b_seen, (b_top + tl.log2(b_divisor)) * LN2, float("-inf"))
    if i_part < 0:
        o_out = o_token * stride_ot + o_head * stride_oh
        p_out = out_ptr + o_out[:, None] + o_value[None, :]
        tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_out)
        if HAS_LSE:
            tl.store(lse_ptr + o_token * stride_lt + o_head, b_lse, mask=m_row)
    else:
        o_part = tl.load(indptr_ptr + o_gather, mask=m_row, other=0).to(tl.int64)
        o_slot = (o_part + i_part) * NUM_Q_HEADS + o_head
        p_part = o_parts_ptr + o_slot[:, None] * V_DIM + o_value[None, :]
        tl.store(p_part, b_out, mask=m_out)
        tl.store(lse_parts_ptr + o_slot, b_lse, mask=m_row)


@triton.jit
def _step(
    b_q,
    b_q_latent,
    b_top,
    b_sum,
    b_acc,
    b_first,
    b_limit,
    b_row,
    i_begin,
    i_block,
    i_end,
    i_table_row,
    k_ptr,
    v_ptr,
    table_ptr,
    scale_log2,
    stride_kt,
    stride_vt,
    stride_table,
    V_DIM: tl.constexpr,
    LATENT: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    PACKS: tl.constexpr,
    LOGIT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add ``BLOCK_N`` KV positions to the running softmax of the rows."""
    o_position = i_block + tl.arange(0, BLOCK_N)
    if PACKS:
        # All rows that attend to this block are of one request.
        m_own = (b_first <= i_block) & (i_block < b_limit)
        b_limit = tl.where(m_own, b_limit, 0)
        i_end = tl.max(b_limit, axis=0)
        i_table_row = tl.max(tl.where(m_own, b_row, 0), axis=0)
        i_skipped = tl.max(tl.where(m_own, b_first, 0), axis=0) - i_begin
    # Past the end the last token is read again, so that K and V need no mask.
    o_read = tl.minimum(o_position, i_end - 1) if MASKED else o_position
    if PACKS:
        o_read -= i_skipped
    p_table = table_ptr + i_table_row.to(tl.int64) * stride_table
    b_page = tl.load(p_table + o_read // PAGE_SIZE).to(tl.int64)
    o_slot = b_page * PAGE_SIZE + o_read % PAGE_SIZE
    o_dim = tl.arange(0, BLOCK_D)
    o_value = tl.arange(0, BLOCK_V)
    # [BLOCK_N, BLOCK_D] and [BLOCK_N, BLOCK_V]
    p_k = k_ptr + (o_slot * stride_kt)[:, None] + o_dim[None, :]
    p_v = v_ptr + (o_slot * stride_vt)[:, None] + o_value[None, :]
    if LATENT:
        p_k += V_DIM
    if BLOCK_D == KEY_DIM:
        b_k = tl.load(p_k)
    else:
        b_k = tl.load(p_k, mask=o_dim[None, :] < KEY_DIM, other=0.0)
    if BLOCK_V == V_DIM:
        b_v = tl.load(p_v)
    else:
        b_v = tl.load(p_v, mask=o_value[None, :] < V_DIM, other=0.0)
    b_k, b_v = b_k.to(b_q.dtype), b_v.to(b_q.dtype)  # of fp8

    # [BLOCK_M, BLOCK_D] @ [BLOCK_D, BLOCK_N]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    if LATENT:
        b_s = tl.dot(b_q_latent, tl.trans(b_v), b_s, input_precision=PRECISION)
    if LOGIT_CAP > 0:
        # tanh(x) is 1 - 2 / (exp(2 x) + 1), also where exp overflows.
        b_exp = tl.exp2(b_s * (scale_log2 * (2.0 / LOGIT_CAP)))
        b_s = LOGIT_CAP * LOG2E * (1.0 - 2.0 / (b_exp + 1.0))
        scale_log2 = 1.0
    if MASKED:
        b_s = tl.where(o_position[None, :] < b_limit[:, None], b_s, float("-inf"))
    b_new = tl.maximum(b_top, tl.max(b_s, axis=1) * scale_log2)
    b_pivot = b_new
    if MASKED:
        # A row without any position yet must not compute inf - inf.
        b_pivot = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s * scale_log2 - b_pivot[:, None])
    b_scale = tl.exp2(b_top - b_pivot)
    b_sum = b_sum * b_scale + tl.sum(b_p, axis=1)
    b_acc = b_acc * b_scale[:, None]
    # [BLOCK_M, BLOCK_N] @ [BLOCK_N, BLOCK_V]
    b_out = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    if PACKS:
        # Zero times another request's value is no zero where that is infinite.
        b_out = tl.where(m_own[:, None], b_out, b_acc)
    return b_new, b_sum, b_out
