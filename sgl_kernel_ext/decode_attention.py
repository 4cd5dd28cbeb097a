"""Attention of decodes on a CPU, compiled with numba: each request reads its KV where it is.

A request may have attended to a part of its KV already, a prefix that several requests read
together. The rest continues from that result, by its log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import torch
from numba.extending import overload

# Tokens whose logits are computed before the softmax continues.
_TILE = 64
_LOWEST = np.float32(-1e30)
# The values of K and V, by dtype, as numba reads them: it has no bfloat16.
DTYPES = {torch.float32: torch.float32, torch.bfloat16: torch.uint16}

# Not all of fastmath: values may be infinite, or no numbers.
_MATH: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy",
}  # fmt: skip
_jit: Callable[..., Any] = numba.njit(cache=True, nogil=True, **_MATH)
_inlined: Callable[..., Any] = numba.njit(cache=True, inline="always", **_MATH)


@_inlined
def _exp(x):  # type: ignore[no-untyped-def]
    """e to the power of a float32 of 0 or less, within 2e-7, in vector instructions."""
    x = max(x, np.float32(-87.0)) * np.float32(math.log2(math.e))
    whole = np.floor(x + np.float32(0.5))
    f = (x - whole) * np.float32(math.log(2))
    power = np.float32(1 / 120) + f * np.float32(1 / 720)
    power = np.float32(1 / 6) + f * (np.float32(1 / 24) + f * power)
    power = np.float32(1) + f * (np.float32(1) + f * (np.float32(0.5) + f * power))
    return power * np.int32((np.int32(whole) + np.int32(127)) << 23).view(np.float32)


def _value(x):  # type: ignore[no-untyped-def]
    """A value of the KV cache as float32, also from the bits of a bfloat16."""
    raise NotImplementedError("only compiled code calls it")


@overload(_value, inline="always")
def _compiled_value(x):  # type: ignore[no-untyped-def]
    if x == numba.types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


@_jit
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, table, rows, begin, end, scale, out, lse, first, last
):
    """Attention of the requests ``first`` to ``last``, as :func:`attend_decodes`."""
    heads, dim = q.shape[1], q.shape[2]
    kv_heads = k.shape[1]
    group = heads // kv_heads
    logits = np.empty((group, _TILE), np.float32)
    queries = np.empty((group, dim), np.float32)
    sums = np.empty((group, dim), np.float32)
    most = np.empty(group, np.float32)
    weight = np.empty(group, np.float32)
    for b in range(first, last):
        slots = table[rows[b]]
        for kv_head in range(kv_heads):
            for g in range(group):
                head = kv_head * group + g
                known = lse[b, head] > _LOWEST
                most[g] = lse[b, head] if known else _LOWEST
                weight[g] = 1.0 if known else 0.0
                for d in range(dim):
                    queries[g, d] = q[b, head, d] * scale
                    sums[g, d] = out[b, head, d] if known else 0.0
            for tile in range(begin[b], end[b], _TILE):
                count = min(_TILE, end[b] - tile)
                for i in range(count):
                    key = k[slots[tile + i], kv_head]
                    for g in range(group):
                        query = queries[g]
                        dot = np.float32(0)
                        for d in range(dim):
                            dot += query[d] * _value(key[d])  # type: ignore[no-untyped-call]
                        logits[g, i] = dot
                for g in range(group):
                    row, total = logits[g], sums[g]
                    highest = most[g]
                    for i in range(count):
                        highest = max(highest, row[i])
                    factor = _exp(most[g] - highest)
                    most[g] = highest
                    added = np.float32(0)
                    for i in range(count):
                        power = _exp(row[i] - highest)
                        row[i] = power
                        added += power
                    weight[g] = weight[g] * factor + added
                    for d in range(dim):
                        total[d] *= factor
                for i in range(count):
                    value = v[slots[tile + i], kv_head]
                    for g in range(group):
                        power, total = logits[g, i], sums[g]
                        for d in range(dim):
                            total[d] += power * _value(value[d])  # type: ignore[no-untyped-call]
            for g in range(group):
                for d in range(dim):
                    out[b, kv_head * group + g, d] = sums[g, d] / weight[g]


@cache
def _threads(number: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(number, "decode-attention")


def attend_decodes(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    rows: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Attention of one token per request to its KV from ``begin`` to ``end``.

    Args:
        q: float32 ``[n, num_heads, head_dim]``.
        k_cache, v_cache: ``[num_slots, num_kv_heads, head_dim]``, of a dtype in ``DTYPES``.
        table: int32 ``[rows, max_tokens]``, the slot of each position of a row.
        rows: int64 ``[n]``, the row of each request.
        begin, end: int64 ``[n]``, positions in the row.
        scale: of the logits.
        out: float32 ``[n, num_heads, head_dim]``, overwritten. Where ``lse`` is not -inf, the
            attention to the tokens before ``begin``, with which the result is merged.
        lse: float32 ``[n, num_heads]``, natural logarithm of the sum of these tokens' weights.
    """
    bits = DTYPES[k_cache.dtype]
    arrays = (
        q.numpy(), k_cache.view(bits).numpy(), v_cache.view(bits).numpy(), table.numpy(),
        rows, begin, end, np.float32(scale), out.numpy(), lse.numpy(),
    )  # fmt: skip
    number = min(torch.get_num_threads(), len(rows))
    if number <= 1:
        _attend(*arrays, 0, len(rows))
        return
    # Equal numbers of tokens for each thread.
    tokens = np.cumsum(end - begin)
    parts = np.arange(1, number) * tokens[-1] // number
    ends = [0, *np.searchsorted(tokens, parts), len(rows)]
    list(_threads(number).map(lambda part: _attend(*arrays, *part), pairwise(ends)))
