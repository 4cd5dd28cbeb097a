"""Decode attention without sharing, as in engines that ignore prefixes.

Split-KV over grouped heads: one program per split of a request's KV and KV head, with
the query heads of the group as the rows of one tile, and the same merge as ours. The
work items are listed on the host, as in engines with a plan step: splits of like
position are adjacent, so that siblings which run at the same time find their common
prefix in the L2 cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from sgl_kernel_ext.merge_state import merge_parts

MIN_SPLIT_TOKENS = 128
LN2 = tl.constexpr(math.log(2))


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the kernel is compiled and how finely KV is split."""

    block_n: int
    num_stages: int
    num_warps: int
    items_per_sm: int


# The benchmark takes the fastest of these for each shape. As K and V are read through
# the page table, Triton spends every second stage on the table: with 3, 5 and 7 stages
# one, two and three blocks of K and V are in flight.
CONFIGS = (
    DecodeConfig(64, 3, 4, 8),
    DecodeConfig(64, 5, 4, 8),
    DecodeConfig(64, 7, 4, 8),
    DecodeConfig(32, 7, 4, 16),
    DecodeConfig(32, 7, 2, 16),
    DecodeConfig(128, 5, 8, 8),
    DecodeConfig(64, 5, 4, 32),
)


@triton.jit  # type: ignore[untyped-decorator]
def split_kv_decode_kernel(  # type: ignore[no-untyped-def]
    items_ptr, q_ptr, k_ptr, v_ptr, table_ptr, out_ptr, o_parts_ptr, lse_parts_ptr,
    scale_log2, stride_q, stride_kt, stride_kh, stride_table,
    NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """An item is (request, first KV position, end, part or -1)."""
    GROUP: tl.constexpr = NUM_Q_HEADS // NUM_KV_HEADS
    p_item = items_ptr + tl.program_id(0) // NUM_KV_HEADS * 4
    i_kv_head = tl.program_id(0) % NUM_KV_HEADS
    i_request = tl.load(p_item).to(tl.int64)
    i_begin = tl.load(p_item + 1)
    i_end = tl.load(p_item + 2)
    i_part = tl.load(p_item + 3).to(tl.int64)

    o_row = tl.arange(0, BLOCK_M)
    m_row = o_row < GROUP
    o_head = i_kv_head * GROUP + o_row
    o_dim = tl.arange(0, HEAD_DIM)
    p_q = q_ptr + i_request * stride_q + o_head[:, None] * HEAD_DIM + o_dim[None, :]
    # [BLOCK_M, HEAD_DIM]
    b_q = tl.load(p_q, mask=m_row[:, None], other=0.0)
    p_k = k_ptr + i_kv_head * stride_kh + o_dim[None, :]
    p_v = v_ptr + i_kv_head * stride_kh + o_dim[None, :]
    p_table = table_ptr + i_request * stride_table

    b_top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    b_acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    for i_block in tl.range(i_begin, i_end, BLOCK_N, num_stages=STAGES):
        o_position = i_block + tl.arange(0, BLOCK_N)
        o_read = tl.minimum(o_position, i_end - 1)
        b_page = tl.load(p_table + o_read // PAGE_SIZE).to(tl.int64)
        o_token = (b_page * PAGE_SIZE + o_read % PAGE_SIZE) * stride_kt
        # [BLOCK_N, HEAD_DIM]
        b_k = tl.load(p_k + o_token[:, None])
        b_v = tl.load(p_v + o_token[:, None])
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2
        b_s = tl.where(o_position[None, :] < i_end, b_s, float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_s, axis=1))
        b_p = tl.exp2(b_s - b_new[:, None])
        b_scale = tl.exp2(b_top - b_new)
        b_sum = b_sum * b_scale + tl.sum(b_p, axis=1)
        b_acc = b_acc * b_scale[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
        b_top = b_new

    b_out = b_acc / b_sum[:, None]
    o_out = o_head[:, None] * HEAD_DIM + o_dim[None, :]
    if i_part < 0:
        p_out = out_ptr + i_request * NUM_Q_HEADS * HEAD_DIM + o_out
        tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_row[:, None])
    else:
        p_part = o_parts_ptr + i_part * NUM_Q_HEADS * HEAD_DIM + o_out
        tl.store(p_part, b_out, mask=m_row[:, None])
        b_lse = (b_top + tl.log2(b_sum)) * LN2
        tl.store(lse_parts_ptr + i_part * NUM_Q_HEADS + o_head, b_lse, mask=m_row)


def split_items(
    kv_len: np.ndarray, num_kv_heads: int, num_sms: int, config: DecodeConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Work items int32 ``[num_items, 4]`` and parts per request as int32 ``[n + 1]``.

    Splits are about equally long. A request with only one split has no parts.
    """
    wanted = max(1, config.items_per_sm * num_sms // num_kv_heads)
    length = max(int(kv_len.sum()) // wanted, MIN_SPLIT_TOKENS)
    splits = -(-kv_len.astype(np.int64) // length)
    lengths = -(-kv_len // splits)
    lengths = -(-lengths // config.block_n) * config.block_n
    splits = -(-kv_len // lengths)
    parts = np.where(splits > 1, splits, 0)
    indptr = np.concatenate([[0], np.cumsum(parts)])
    items = []
    for split in range(int(splits.max())):
        request = np.nonzero(splits > split)[0]
        begin = split * lengths[request]
        end = np.minimum(begin + lengths[request], kv_len[request])
        part = np.where(splits[request] > 1, indptr[request] + split, -1)
        items.append(np.stack([request, begin, end, part], axis=1))
    return np.concatenate(items).astype(np.int32), indptr.astype(np.int32)


class SplitKVDecode:
    """One planned batch of decodes. Each request's table row is its index.

    Args:
        kv_len: int32 ``[n]`` on the host.
        q: ``[n, num_q_heads, head_dim]``, contiguous. ``head_dim`` is a power of two.
        table: int32 ``[n, max_pages]``.
        num_sms: multiprocessors of the device.
    """

    def __init__(
        self,
        kv_len: np.ndarray,
        q: torch.Tensor,
        table: torch.Tensor,
        num_kv_heads: int,
        page_size: int,
        scale: float,
        num_sms: int,
        config: DecodeConfig = CONFIGS[0],
    ) -> None:
        items, indptr = split_items(kv_len, num_kv_heads, num_sms, config)
        device, num_heads = q.device, q.shape[1]
        self.q, self.table, self.config = q, table, config
        self.num_kv_heads, self.page_size, self.scale = num_kv_heads, page_size, scale
        self.items = torch.from_numpy(items).to(device)
        self.indptr = torch.from_numpy(indptr).to(device)
        self.rows = torch.arange(len(kv_len), dtype=torch.int32, device=device)
        self.count = torch.tensor([len(kv_len)], dtype=torch.int32, device=device)
        self.num_parts = int(indptr[-1])
        shape = (max(1, self.num_parts), num_heads, q.shape[2])
        self.o_parts = torch.empty(shape, dtype=torch.float32, device=device)
        self.lse_parts = torch.empty(shape[:2], dtype=torch.float32, device=device)

    def run(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        """One layer. k_cache and v_cache have the same strides, ``out`` is like q."""
        num_heads, head_dim = self.q.shape[1:]
        group = num_heads // self.num_kv_heads
        exact = self.q.dtype == torch.float32
        split_kv_decode_kernel[(len(self.items) * self.num_kv_heads,)](
            self.items, self.q, k_cache, v_cache, self.table, out,
            self.o_parts, self.lse_parts, self.scale * math.log2(math.e),
            self.q.stride(0), *k_cache.stride()[:2], self.table.stride(0),
            NUM_Q_HEADS=num_heads, NUM_KV_HEADS=self.num_kv_heads, HEAD_DIM=head_dim,
            PAGE_SIZE=self.page_size, BLOCK_M=max(16, triton.next_power_of_2(group)),
            BLOCK_N=self.config.block_n, STAGES=self.config.num_stages,
            PRECISION="ieee" if exact else "tf32", num_warps=self.config.num_warps,
        )  # fmt: skip
        if self.num_parts:
            merge_parts(
                self.o_parts, self.lse_parts, self.indptr, self.rows, self.count, out,
                num_programs=len(self.rows),
            )  # fmt: skip
