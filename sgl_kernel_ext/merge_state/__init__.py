"""Merge partial attention results by their log-sum-exp.

Each part has an lse, the natural logarithm of the sum of its exponentiated logits. A
part with lse -inf is empty: it changes nothing, and its output is not read. If all
parts are empty, the output is 0 and the lse is -inf.
"""

from __future__ import annotations

import torch

from sgl_kernel_ext.merge_state.merge_state_kernel import merge_parts_kernel
from sgl_kernel_ext.utils import (
    FLOAT_DTYPES,
    check_runnable,
    check_tensor,
    next_power_of_two,
)

__all__ = ["merge_parts", "merge_parts_ref", "with_sinks"]

# Values that one program holds: 16 per thread of four warps.
BLOCK_VALUES = 2048
# Parts loaded at once. Most tokens have two to four.
BLOCK_PARTS = 4


def merge_parts(
    o_parts: torch.Tensor,
    lse_parts: torch.Tensor,
    indptr: torch.Tensor,
    rows: torch.Tensor,
    num_tokens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    num_programs: int,
    sinks: torch.Tensor | None = None,
) -> None:
    """Merge a varying number of parts per token into ``out`` (and ``lse``).

    Token ``t`` has the parts ``indptr[t]:indptr[t + 1]`` and is written to row
    ``rows[t]``. Rows of tokens without parts are not changed.

    Args:
        o_parts: float32 ``[num_parts, num_heads, head_dim]``, contiguous.
        lse_parts: float32 ``[num_parts, num_heads]``, contiguous, natural log.
        indptr: int32 ``[at least num_tokens + 1]``.
        rows: int32 ``[at least num_tokens]``.
        num_tokens: int32 ``[1]`` on the device, so that a CUDA graph can be replayed
            with another number of tokens.
        out: ``[num_rows, num_heads, head_dim]``, changed in place.
        lse: float32 ``[num_rows, num_heads]``, changed in place.
        num_programs: size of the grid over tokens. Any size gives the same result.
        sinks: ``[num_heads]``, a logit that each head attends to once per token beside
            the parts, with a value of zero.

    Raises:
        ValueError: for a wrong shape, dtype, stride or device.
    """
    for name, parts in (("o_parts", o_parts), ("lse_parts", lse_parts)):
        if not parts.is_contiguous():
            raise ValueError(f"{name} is not contiguous; pass a contiguous tensor")
    device, float32, int32 = o_parts.device, (torch.float32,), (torch.int32,)
    check_tensor("o_parts", o_parts, (None, None, None), float32, device)
    num_parts, num_heads, head_dim = o_parts.shape
    check_tensor("lse_parts", lse_parts, (num_parts, num_heads), float32, device)
    check_tensor("rows", rows, (None,), int32, device)
    check_tensor("indptr", indptr, (None,), int32, device, len(rows) + 1)
    check_tensor("num_tokens", num_tokens, (None,), int32, device)
    check_tensor("out", out, (None, num_heads, head_dim), FLOAT_DTYPES, device)
    if lse is not None:
        check_tensor("lse", lse, (out.shape[0], num_heads), float32, device)
    if sinks is not None:
        check_tensor("sinks", sinks, (num_heads,), FLOAT_DTYPES, device)
    check_runnable(merge_parts_kernel, out.device, "merge_parts_ref")
    block_d = next_power_of_two(head_dim)
    fitting = max(1, BLOCK_VALUES // (block_d * BLOCK_PARTS))
    block_h = min(fitting, next_power_of_two(num_heads))
    merge_parts_kernel[(num_programs, -(-num_heads // block_h))](
        o_parts,
        lse_parts,
        indptr,
        rows,
        num_tokens,
        out,
        lse_parts if lse is None else lse,
        *out.stride()[:2],
        0 if lse is None else lse.stride(0),
        sinks,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_P=BLOCK_PARTS,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        HAS_LSE=lse is not None,
    )


def merge_parts_ref(
    o_parts: torch.Tensor,
    lse_parts: torch.Tensor,
    indptr: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """:func:`merge_parts` in plain PyTorch, float32, of the tokens of ``indptr``."""
    num_parts = int(indptr[-1])
    if num_parts == 0:
        return
    counts = indptr.diff().long()
    device = o_parts.device
    token = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
    part_lse = lse_parts[:num_parts].float()
    filled = part_lse > -torch.inf
    top = part_lse.new_full((len(counts), part_lse.shape[1]), -torch.inf)
    index = token[:, None].expand_as(part_lse)
    top = top.scatter_reduce(0, index, part_lse, "amax")
    weight = torch.where(filled, torch.exp(part_lse - top[token]), 0.0)
    value = torch.where(filled[..., None], o_parts[:num_parts].float(), 0.0)
    total = torch.zeros_like(top).index_add_(0, token, weight)
    merged = value.new_zeros(len(counts), *value.shape[1:])
    merged.index_add_(0, token, weight[..., None] * value)
    merged /= torch.where(total > 0, total, 1.0)[..., None]
    merged, merged_lse = with_sinks(merged, top + torch.log(total), sinks)
    written = counts > 0
    target = rows.long()[written]
    out[target] = merged[written].to(out.dtype)
    if lse is not None:
        lse[target] = merged_lse[written]


def with_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention ``out`` and ``lse`` (float32) with ``sinks`` as of :func:`merge_parts`."""
    if sinks is None:
        return out, lse
    sinks = sinks.float()
    return out * (lse - sinks).sigmoid()[..., None], torch.logaddexp(lse, sinks)
