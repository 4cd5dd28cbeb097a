"""merge_state in plain PyTorch, float32, as a reference for the kernel."""

from __future__ import annotations

import torch


def merge_parts_ref(
    o_parts: torch.Tensor,
    lse_parts: torch.Tensor,
    indptr: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """Merge a varying number of parts per token into ``out`` (and ``lse``).

    Token ``t`` has the parts ``indptr[t]:indptr[t + 1]`` and is written to row
    ``rows[t]``. Rows of tokens without parts are not changed.

    Args:
        o_parts: float32 ``[num_parts, num_heads, head_dim]``.
        lse_parts: float32 ``[num_parts, num_heads]``, natural log.
        indptr: int32 ``[num_tokens + 1]``.
        rows: int32 ``[num_tokens]``.
        out: ``[num_rows, num_heads, head_dim]``, changed in place.
        lse: float32 ``[num_rows, num_heads]``, changed in place.
    """
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
    written = counts > 0
    target = rows.long()[written]
    out[target] = merged[written].to(out.dtype)
    if lse is not None:
        lse[target] = (top + torch.log(total))[written]
