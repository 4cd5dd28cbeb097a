"""Attention over one span, in plain PyTorch: a step of tests that merge spans."""

from __future__ import annotations

import torch


def attend_span(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of some query tokens over one span of KV, in float32.

    Args:
        q: ``[count, num_q_heads, head_dim]``.
        k, v: ``[span, num_kv_heads, head_dim]``; the span may be empty.
        causal: the queries are the last tokens of the span, and none sees those after
            its own.

    Returns:
        The output, of the shape of q and 0 for an empty span, and the natural lse
        ``[count, num_q_heads]``, then -inf.
    """
    count, span = len(q), len(k)
    if span == 0:
        return torch.zeros(q.shape), torch.full(q.shape[:2], -torch.inf)
    group = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, dim=1)
    values = v.float().repeat_interleave(group, dim=1)
    logits = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if causal:
        own = torch.arange(span - count, span)
        logits.masked_fill_(torch.arange(span) > own[:, None], -torch.inf)
    out = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values)
    return out, logits.logsumexp(-1).T
