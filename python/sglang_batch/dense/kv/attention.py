"""Attention of one new token per row over a masked slab, for transformers.

transformers repeats the heads of keys and values where there is a mask. Here the query
heads that share a KV head become its rows, so nothing is copied. On a CPU, rows that see
little of a wide slab attend one by one, each to the columns that it sees.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "dense_rows"
# Rows attend one by one if they see less than this share of rows times columns: then the
# cells that nobody sees cost more than further calls.
_SPARSE = 0.4


def register() -> None:
    """Make the attention known to transformers as :data:`NAME`."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' ``sdpa``.

    Args:
        query: ``[rows, heads, new tokens, head_dim]``.
        key, value: ``[rows, KV heads, columns, head_dim]``.
        attention_mask: broadcast to ``[rows, heads, new tokens, columns]``.

    Returns:
        ``[rows, new tokens, heads, head_dim]``, and None for the weights.
    """
    rows, heads, tokens, head_dim = query.shape
    kv_heads = key.shape[1]
    plain = kwargs.get("position_bias") is None and not kwargs.get("dropout")
    if tokens > 1 or not plain:
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return found
    folded = query.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    seen = _columns_seen(attention_mask)
    if seen is not None:
        parts = [
            scaled_dot_product_attention(
                folded[row : row + 1],
                key[row : row + 1, :, -count:],
                value[row : row + 1, :, -count:],
                scale=scaling,
            )
            for row, count in enumerate(seen)
        ]
        out = torch.cat(parts)
    else:
        if attention_mask is not None and attention_mask.shape[1] == heads:
            attention_mask = attention_mask.reshape(*folded.shape[:3], -1)
        out = scaled_dot_product_attention(
            folded, key, value, attn_mask=attention_mask, scale=scaling
        )
    return out.reshape(rows, 1, heads, out.shape[-1]), None


class _LastMask:
    """All layers of a step have the same mask, which is looked at once."""

    mask: torch.Tensor | None = None
    seen: list[int] | None = None


def _columns_seen(mask: torch.Tensor | None) -> list[int] | None:
    """How many of the last columns each row sees, or None if all rows shall attend at once.

    A sliding window hides columns in front too, so this holds for it as well.
    """
    if (
        mask is None
        or mask.device.type != "cpu"
        or mask.dtype != torch.bool
        or mask.shape[1] != 1
    ):
        return None
    if mask is not _LastMask.mask:
        _LastMask.mask, _LastMask.seen = mask, _sparse(mask[:, 0, 0])
    return _LastMask.seen


def _sparse(mask: torch.Tensor) -> list[int] | None:
    rows, columns = mask.shape
    counts = mask.sum(-1)
    at_end = mask.int().argmax(-1) == columns - counts
    if int(counts.sum()) >= _SPARSE * rows * columns or not bool(at_end.all()):
        return None
    seen: list[int] = counts.tolist()
    return seen if min(seen) > 0 else None
