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


def merge_two(
    a: torch.Tensor, lse_a: torch.Tensor, b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two partial attention results.

    Args:
        a, b: partial outputs, float ``[num_tokens, num_heads, head_dim]``.
        lse_a, lse_b: natural log-sum-exp, float32 ``[num_tokens, num_heads]``; -inf
            marks an empty part, whose output is not read.

    Returns:
        The merged output in the dtype of ``a`` and its lse in float32.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    out = torch.zeros(a.shape, dtype=torch.float32, device=a.device)
    for part, part_lse in ((a, lse_a), (b, lse_b)):
        filled = part_lse > -torch.inf
        weight = torch.where(filled, torch.exp(part_lse - lse), 0.0)
        value = torch.where(filled[..., None], part.float(), 0.0)
        out += weight[..., None] * value
    return out.to(a.dtype), lse
