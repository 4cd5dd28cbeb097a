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
# Where reading a prefix once is faster, by `benchmark/bench_cpu_attention.py`: for decodes if
# so many values of K and V are not read again, for prompts if it has so many tokens.
_LEAST_VALUES, _LEAST_TOKENS = 1 << 22, 400
# The tokens of a request attend one by one, where each reads only what it sees, if they are at
# most so many, and so are the pairs of them and of tokens before them: by the same benchmark.
_MOST_ALONE, _MOST_PAIRS = 512, 1 << 14


class Span(NamedTuple):
    """Positions ``begin`` to ``end`` of the rows of some requests, which have the same slots.

    requests: int64 ``[at least 2]``, indices of requests in the step.
    """

    requests: np.ndarray
    begin: int
    end: int


def shared_spans(
    table: np.ndarray,
    rows: np.ndarray,
    ends: np.ndarray,
    least: np.ndarray,
    worth: float,
) -> list[Span]:
    """The prefixes that requests of a step share, those of more requests first.

    Args:
        table: int32 ``[rows, max_tokens]``, the slot of each position of a row.
        rows, ends: int64 ``[n]``, of each request its row, and the tokens of it that count.
        least: int64 ``[n]``, tokens that a span of each request must have.
        worth: tokens that it must save where all of ``least`` is 0, over all requests but one.
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
            length, most = end - begin, least[alike].max()
            if length >= most and (most or (len(alike) - 1) * length >= worth):
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
    token_values: of K and V of one token in one layer.
    """

    def __init__(
        self,
        table: torch.Tensor,
        rows: np.ndarray,
        ends: np.ndarray,
        counts: np.ndarray,
        token_values: int,
    ) -> None:
        self._table, self._rows, self._ends, self._counts = table, rows, ends, counts
        # Where the queries of each request begin.
        self._first = np.cumsum(counts) - counts
        known = ends - counts
        least = np.where(counts > 1, _LEAST_TOKENS, 0)
        worth = _LEAST_VALUES / token_values
        self._spans = shared_spans(table.numpy(), rows, known, least, worth)
        self._own = np.zeros_like(ends)
        self._queries = []
        for requests, _, end in self._spans:
            self._own[requests] = end
            self._queries.append(self._tokens(requests))
        pairs = counts * (known - self._own)
        alone = (counts <= _MOST_ALONE) & (pairs <= _MOST_PAIRS) | (counts == 1)
        self._together = np.flatnonzero(~alone)
        requests = np.flatnonzero(alone)
        self._alone = self._tokens(requests)
        # Of each of these tokens: the row, what is left of it to see, and its own place.
        of = np.repeat(requests, counts[requests])
        self._row, self._begin = rows[of], self._own[of]
        self._end = known[of] + 1 + _numbers(counts[requests])
        self._masks: dict[tuple[int, int | None], torch.Tensor | None] = {}

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
            With the shape of q, of its dtype or float32.
        """
        windowed = window is not None and window >= 0
        begin = np.maximum(0, self._end - 1 - window) if windowed else self._begin
        arrays = (self._table, self._row, begin, self._end, scale)
        if not len(self._together) and (windowed or not self._spans):
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            lse = torch.full(q.shape[:2], float("-inf"))
            attend_decodes(q, k_cache, v_cache, *arrays, out, lse)
            return out
        out = torch.zeros(q.shape, dtype=torch.float32)
        lse = torch.full(q.shape[:2], float("-inf"))
        if not windowed:
            for span, queries in zip(self._spans, self._queries, strict=True):
                self._attend_span(q, k_cache, v_cache, scale, span, queries, out, lse)
        at = self._alone
        single = out[at]
        attend_decodes(q[at], k_cache, v_cache, *arrays, single, lse[at])
        out[at] = single
        for number in self._together:
            first, count = self._first[number], self._counts[number]
            tokens = slice(first, first + count)
            start = self._own[number]
            if windowed:
                start = max(0, self._ends[number] - count - window)
            slots = self._table[self._rows[number], start : self._ends[number]]
            keys, values = k_cache[slots].to(q.dtype), v_cache[slots].to(q.dtype)
            mask = self._mask(number, start, window, q.dtype)
            part = _attend(q[tokens], keys, values, scale, mask, causal=mask is None)
            if start and not windowed:
                merge(out[tokens], lse[tokens], *part)
            else:
                out[tokens] = part[0]
        return out

    def _mask(
        self, number: int, start: int, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """What the tokens of a request do not see of its KV from ``start`` on, the same for all
        layers. None if each sees all of its own tokens up to itself, and there are no others.
        """
        key = int(number), window
        if key not in self._masks:
            count, length = self._counts[number], self._ends[number] - start
            before = int(length - count)
            is_cut = window is not None and 0 <= window < count
            mask = None
            if before or is_cut:
                seen = torch.ones(count, length, dtype=torch.bool).tril(before)
                if window is not None and window >= 0:
                    seen = seen.triu(before - window)
                mask = torch.zeros(seen.shape, dtype=dtype)
                mask.masked_fill_(~seen, float("-inf"))
            self._masks[key] = mask
        return self._masks[key]

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
        slots = self._table[row, span.begin : span.end]
        keys, values = k_cache[slots].to(q.dtype), v_cache[slots].to(q.dtype)
        part = _attend(q[queries], keys, values, scale)
        whole, whole_lse = out[queries], lse[queries]
        merge(whole, whole_lse, *part)
        out[queries], lse[queries] = whole, whole_lse


def _numbers(counts: np.ndarray) -> np.ndarray:
    """0 to each count, one after the other, int64."""
    first: np.ndarray = np.repeat(np.cumsum(counts) - counts, counts)
    numbers: np.ndarray = np.arange(len(first)) - first
    return numbers


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``[n, heads, dim]`` to ``[length, kv_heads, dim]``, with its lse ``[n, heads]``.

    mask: added to the logits ``[n, length]``.
    causal: the queries are those of the tokens, and see what is before them.
    """
    count, heads, dim = q.shape
    kv_heads = keys.shape[1]
    # [kv_heads, heads of one, tokens, dim]; K and V are not copied for each of them.
    shape = (kv_heads, heads // kv_heads, len(keys), dim)
    part, lse = _flash(
        q.reshape(count, *shape[:2], dim).permute(1, 2, 0, 3),
        keys.transpose(0, 1).unsqueeze(1).expand(shape),
        values.transpose(0, 1).unsqueeze(1).expand(shape),
        is_causal=causal,
        attn_mask=mask,
        scale=scale,
    )
    part = part.permute(2, 0, 1, 3).reshape(q.shape)
    return part, lse.permute(2, 0, 1).reshape(count, heads)


def merge(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merge attention to other tokens into ``out`` and ``lse``, in place.

    out: float32 ``[n, heads, dim]``, finite where ``lse`` ``[n, heads]`` is -inf.
    """
    together = torch.logaddexp(lse, part_lse)
    old = (lse - together).exp().unsqueeze(-1)
    new = (part_lse - together).exp().unsqueeze(-1)
    out.mul_(old).add_(part.float() * new)
    lse.copy_(together)
