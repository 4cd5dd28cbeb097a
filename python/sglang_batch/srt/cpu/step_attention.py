"""Attention in PyTorch, on a CPU, in which prefixes that requests of a step share are read once.

SGLang's ``torch_native`` attention goes from request to request. Of each it copies the KV, and
of prompts with a cached prefix it also computes the prefix's own attention again. Here the
queries of all requests with a common prefix attend to it together. Each request then attends
to the rest of its KV by itself, and both results are merged by their log-sum-exp.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from sgl_kernel_ext.decode_attention import attend_decodes

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# Bytes of KV that have to be read again and again for a prefix to be worth reading apart.
# Reading it apart costs about 0.1 ms, in which a request reads this much.
_WORTH_BYTES = 1 << 20


class Span(NamedTuple):
    """Positions ``begin`` to ``end`` of the rows of some requests, which have the same slots.

    requests: int64 ``[at least 2]``, indices of requests in the step.
    """

    requests: np.ndarray
    begin: int
    end: int


def shared_spans(
    table: np.ndarray, rows: np.ndarray, ends: np.ndarray, worth: float
) -> list[Span]:
    """The prefixes that requests of a step share, those of more requests first.

    Args:
        table: int32 ``[rows, max_tokens]``, the slot of each position of a row.
        rows, ends: int64 ``[n]``, of each request its row, and the tokens of it that count.
        worth: tokens that a span must save, over all its requests but one.
    """
    spans = []
    left = [(np.arange(len(rows)), 0, 0)]
    while left:
        requests, begin, at = left.pop()
        requests = requests[ends[requests] > at]
        if len(requests) < 2:
            continue
        firsts = table[rows[requests], at]
        order = np.argsort(firsts, kind="stable")
        breaks = np.flatnonzero(np.diff(firsts[order])) + 1
        for alike in np.split(requests[order], breaks):
            if len(alike) < 2:
                continue
            end = int(ends[alike].min())
            slots = table[rows[alike], at:end]
            differ = (slots != slots[0]).any(axis=0)
            end = at + int(differ.argmax()) if differ.any() else end
            start = begin
            if (len(alike) - 1) * (end - begin) >= worth:
                spans.append(Span(np.sort(alike), begin, end))
                start = end
            left.append((alike, start, end))
    return spans


class StepAttention:
    """Attention of the layers of one step.

    table: int32 ``[rows, max_tokens]``, the slot of each position of a row.
    rows: int64 ``[n]``, of each request.
    ends: int64 ``[n]``, tokens of each request, with those that are computed in this step.
    counts: int64 ``[n]``, tokens of each that are computed in this step.
    token_bytes: of K and V of one token in one layer.
    """

    def __init__(
        self,
        table: torch.Tensor,
        rows: np.ndarray,
        ends: np.ndarray,
        counts: np.ndarray,
        token_bytes: int,
    ) -> None:
        self._table, self._rows, self._ends, self._counts = table, rows, ends, counts
        # Where the queries of each request begin.
        self._first = np.cumsum(counts) - counts
        known = ends - counts
        worth = _WORTH_BYTES / max(1, token_bytes)
        self._spans = shared_spans(table.numpy(), rows, known, worth)
        self._own = np.zeros_like(ends)
        self._queries = []
        for requests, _, end in self._spans:
            self._own[requests] = end
            self._queries.append(self._tokens(requests))
        self._one = np.flatnonzero(counts == 1)
        self._one_tokens = self._tokens(self._one)

    def _tokens(self, requests: np.ndarray) -> torch.Tensor:
        """The tokens of some requests, int64, by operators of torch alone."""
        are_theirs = torch.zeros(int(self._counts.sum()), dtype=torch.bool)
        for first, count in zip(
            self._first[requests], self._counts[requests], strict=True
        ):
            are_theirs[first : first + count].fill_(True)
        return are_theirs.nonzero().flatten()

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention of one layer.

        q: ``[num_tokens, num_heads, head_dim]``.
        k_cache, v_cache: ``[num_slots, num_kv_heads, head_dim]``.
        window: tokens before each query that it sees. None or negative: all of them.

        Returns:
            float32, with the shape of q.
        """
        out = torch.empty(q.shape, dtype=torch.float32)
        lse = torch.full(q.shape[:2], float("-inf"))
        begin = self._own
        if window is not None and window >= 0:
            begin = np.maximum(0, self._ends - self._counts - window)
        else:
            for span, queries in zip(self._spans, self._queries, strict=True):
                self._attend_span(q, k_cache, v_cache, scale, span, queries, out, lse)
        one, at = self._one, self._one_tokens
        single = out[at]
        attend_decodes(
            q[at].float(), k_cache, v_cache, self._table, self._rows[one],
            begin[one], self._ends[one], scale, single, lse[at],
        )  # fmt: skip
        out[at] = single
        for number in np.flatnonzero(self._counts > 1):
            first = self._first[number]
            tokens = slice(first, first + self._counts[number])
            known = self._table[self._rows[number], begin[number] : self._ends[number]]
            slots = known.long()
            keys, values = k_cache[slots].to(q.dtype), v_cache[slots].to(q.dtype)
            part, part_lse = _attend_one(q[tokens], keys, values, scale, window)
            if begin is self._own and begin[number]:
                merge(out[tokens], lse[tokens], part, part_lse)
            else:
                out[tokens] = part
        return out

    def _attend_span(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        span: Span,
        queries: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Attention of all queries of a span's requests to the span, merged into both."""
        row = self._rows[span.requests[0]]
        slots = self._table[row, span.begin : span.end].long()
        # [1, kv_heads, tokens, head_dim], and the queries of all heads of a KV head in one.
        keys = k_cache[slots].to(q.dtype).transpose(0, 1).unsqueeze(0)
        values = v_cache[slots].to(q.dtype).transpose(0, 1).unsqueeze(0)
        heads, dim = q.shape[1:]
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        folded = q[queries].view(-1, kv_heads, group, dim).transpose(0, 1)
        part, part_lse = _flash(
            folded.reshape(1, kv_heads, -1, dim), keys, values, scale=scale
        )
        part = part.view(kv_heads, -1, group, dim).transpose(0, 1)
        part_lse = part_lse.view(kv_heads, -1, group).transpose(0, 1)
        whole, whole_lse = out[queries], lse[queries]
        merge(
            whole, whole_lse, part.reshape(-1, heads, dim), part_lse.reshape(-1, heads)
        )
        out[queries], lse[queries] = whole, whole_lse


def _attend_one(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a request's last tokens, ``[n, heads, dim]`` and lse ``[n, heads]``."""
    count, heads, dim = q.shape
    kv_heads = keys.shape[1]
    before = len(keys) - count
    # [kv_heads, heads of one, tokens, dim]; K and V are not copied for each of them.
    queries = q.view(count, kv_heads, -1, dim).permute(1, 2, 0, 3)
    shape = (kv_heads, heads // kv_heads, len(keys), dim)
    mask = None
    if before or (window is not None and 0 <= window < count):
        seen = torch.ones(count, len(keys), dtype=torch.bool).tril(before)
        if window is not None and window >= 0:
            seen = seen.triu(before - window)
        mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, float("-inf"))
    part, lse = _flash(
        queries,
        keys.transpose(0, 1).unsqueeze(1).expand(shape),
        values.transpose(0, 1).unsqueeze(1).expand(shape),
        is_causal=mask is None,
        attn_mask=mask,
        scale=scale,
    )
    part = part.permute(2, 0, 1, 3).reshape(q.shape)
    return part, lse.permute(2, 0, 1).reshape(count, heads)


def merge(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merge attention to other tokens into ``out`` and ``lse``, in place.

    out: float32 ``[n, heads, dim]``, of any value where ``lse`` ``[n, heads]`` is -inf.
    """
    together = torch.logaddexp(lse, part_lse)
    old = (lse - together).exp().unsqueeze(-1)
    new = (part_lse - together).exp().unsqueeze(-1)
    kept = torch.where(old > 0, out * old, 0.0)
    torch.add(kept, part.float() * new, out=out)
    lse.copy_(together)
