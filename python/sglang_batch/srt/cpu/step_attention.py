"""Attention of all requests of a step at once, on a CPU, without copies of their KV.

SGLang's ``torch_native`` attention goes from request to request. Of each it copies the KV, and
of prompts with a cached prefix it also computes the prefix's own attention again. Here the
tokens of a prompt read its KV together, and so do the decodes whose requests share a prefix.
Each of these then attends to the rest of its KV by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from sgl_kernel_ext.block_attention import attend_blocks
from sgl_kernel_ext.decode_attention import attend_decodes
from sgl_kernel_ext.host_kernels import array
from sgl_kernel_ext.vector_products import HAS_PAIRS

# Tokens of a prefix, over all its requests but two, from which on its decodes are faster
# together, by `benchmark/bench_cpu_attention.py`.
_WORTH = 1024
_WORTH_OF_PAIRS = 512  # where the processor multiplies bfloat16


def worth_of(dtype: torch.dtype) -> int:
    """Tokens that a shared prefix must have, over all its requests but two, by their dtype."""
    return _WORTH_OF_PAIRS if HAS_PAIRS and dtype == torch.bfloat16 else _WORTH


class Span(NamedTuple):
    """Positions ``begin`` to ``end`` of the rows of some requests, which have the same slots.

    requests: int64 ``[at least 2]``, indices of requests in the step.
    """

    requests: np.ndarray
    begin: int
    end: int


def shared_spans(
    table: np.ndarray, rows: np.ndarray, ends: np.ndarray, worth: int
) -> list[Span]:
    """The prefixes that requests of a step share, those of more requests first.

    Args:
        table: int32 ``[rows, max_tokens]``, the slot of each position of a row.
        rows, ends: int64 ``[n]``, of each request its row, and the tokens of it that count.
        worth: tokens that a span must have, over all its requests but two. To read it once
            costs about as much as to read it for two of them by themselves.
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
            if (len(alike) - 2) * (end - begin) >= worth:
                spans.append(Span(np.sort(alike), begin, end))
                start = end
            left.append((alike, start, end))
    return spans


class _Blocks(NamedTuple):
    """Tokens that read KV together, as :func:`attend_blocks` takes them."""

    rows: np.ndarray
    ends: np.ndarray
    tokens: np.ndarray


def _blocks(readers: list[tuple[int, np.ndarray]], size: int) -> _Blocks:
    """Blocks of rows and the tokens that read each, of at most so many tokens."""
    parts = [
        (row, part)
        for row, tokens in readers
        for part in np.array_split(tokens, -(-len(tokens) // size))
    ]
    ends = np.cumsum([0, *(len(tokens) for _, tokens in parts)])
    rows = np.array([row for row, _ in parts], np.int64)
    return _Blocks(rows, ends, np.concatenate([tokens for _, tokens in parts]))


class StepAttention:
    """Attention of the layers of one step.

    table: int32 ``[rows, max_tokens]``, the slot of each position of a row.
    rows: int64 ``[n]``, of each request.
    ends: int64 ``[n]``, tokens of each request, with those that are computed in this step.
    counts: int64 ``[n]``, tokens of each that are computed in this step.
    block_size: most tokens that read KV together.
    worth: see :func:`shared_spans`.
    """

    def __init__(
        self,
        table: torch.Tensor,
        rows: np.ndarray,
        ends: np.ndarray,
        counts: np.ndarray,
        block_size: int,
        worth: int,
    ) -> None:
        self._table = table.numpy()
        known = ends - counts
        # Where the tokens of each request begin.
        first = np.cumsum(counts) - counts
        # Of each token the positions that it sees by itself.
        self._end = np.repeat(known - first, counts) + np.arange(1, counts.sum() + 1)
        self._begin = np.zeros_like(self._end)
        decodes = np.where(counts == 1, known, 0)
        levels: list[list[Span]] = []
        depth = np.zeros(len(rows), np.int64)
        for span in shared_spans(self._table, rows, decodes, worth):
            level = int(depth[span.requests].max())
            depth[span.requests] = level + 1
            levels += [[]] * (level == len(levels))
            levels[level] = [*levels[level], span]
        # Of each level its blocks, and the positions that their tokens see. A request is in
        # one of them, so they may be computed at the same time.
        self._shared: list[tuple[_Blocks, np.ndarray, np.ndarray]] = []
        for spans in levels:
            begin, end = np.zeros((2, len(self._end)), np.int64)
            for span in spans:
                begin[first[span.requests]] = span.begin
                end[first[span.requests]] = self._begin[first[span.requests]] = span.end
            readers = [(rows[s.requests[0]], first[s.requests]) for s in spans]
            self._shared.append((_blocks(readers, block_size), begin, end))
        self._single, self._single_rows = first[counts == 1], rows[counts == 1]
        prompts = [
            (rows[i], np.arange(first[i], first[i] + counts[i]))
            for i in np.flatnonzero(counts > 1)
        ]
        self._prompts = _blocks(prompts, block_size) if prompts else None

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
        cache = array(q.contiguous()), array(k_cache), array(v_cache)
        self.attend_values(*cache, scale, window, out.numpy())
        return out

    def attend_values(
        self,
        q: np.ndarray,
        k_cache: np.ndarray,
        v_cache: np.ndarray,
        scale: float,
        window: int | None,
        out: np.ndarray,
    ) -> None:
        """As :meth:`attend`, of tensors' values as :func:`array` has them, into ``out``."""
        cache = q, k_cache, v_cache, self._table
        lse = np.full(q.shape[:2], -np.inf, np.float32)
        begin, end = self._begin, self._end
        if window is not None and window >= 0:
            begin = np.maximum(0, end - 1 - window)
        else:
            for blocks, first, last in self._shared:
                attend_blocks(*cache, *blocks, first, last, scale, out, lse)
        if self._prompts is not None:
            attend_blocks(*cache, *self._prompts, begin, end, scale, out, lse)
        if len(self._single):
            tokens = self._single_rows, self._single
            attend_decodes(*cache, *tokens, begin, end, scale, out, lse)
