"""Attention of single tokens on a CPU, compiled with numba: each reads its KV where it is.

A token may have attended to a part of its KV already, a prefix that several requests read
together. The rest continues from that result, by its log-sum-exp.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from .host_kernels import (
    as_float,
    in_parts,
    jit,
    negative_exp,
    parallel,
    prefetch_heads,
)  # fmt: skip

# Tokens whose logits are computed before the softmax continues. Meanwhile the next tile is
# loaded: the KV of a step is larger than a cache, and its slots are nowhere near each other.
_TILE = 16
_LOWEST = np.float32(-1e30)
# Products of a query and a key that another thread is worth: some 25 us of work.
_PART = 1 << 17


@jit
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, table, rows, tokens, begin, end, scale, out, lse, first, last
):
    """Attention of a range of the tokens, as :func:`attend_decodes`."""
    heads, dim = q.shape[1], q.shape[2]
    kv_heads = k.shape[1]
    group = heads // kv_heads
    logits = np.empty((group, _TILE), np.float32)
    queries = np.empty((heads, dim), np.float32)
    sums = np.empty((heads, dim), np.float32)
    most = np.empty(heads, np.float32)
    weight = np.empty(heads, np.float32)
    for at in range(first, last):
        slots, b = table[rows[at]], tokens[at]
        for head in range(heads):
            known = lse[b, head] > _LOWEST
            most[head] = lse[b, head] if known else _LOWEST
            weight[head] = 1.0 if known else 0.0
            for d in range(dim):
                queries[head, d] = as_float(q[b, head, d]) * scale
                sums[head, d] = out[b, head, d] if known else np.float32(0)
        for tile in range(begin[b], end[b], _TILE):
            count = min(_TILE, end[b] - tile)
            whole = count - count % 4
            next_slots, next_begin, next_end = slots, tile + _TILE, end[b]
            if next_begin >= next_end and at + 1 < last:
                next_slots, following = table[rows[at + 1]], tokens[at + 1]
                next_begin, next_end = begin[following], end[following]
            next_end = min(next_end, next_begin + _TILE)
            for kv_head in range(kv_heads):
                first_head = kv_head * group
                prefetch_heads(k, next_slots, next_begin, next_end, kv_head)
                for i in range(0, whole, 4):
                    key0, key1 = (
                        k[slots[tile + i], kv_head],
                        k[slots[tile + i + 1], kv_head],
                    )
                    key2, key3 = (
                        k[slots[tile + i + 2], kv_head],
                        k[slots[tile + i + 3], kv_head],
                    )
                    for g in range(group):
                        query = queries[first_head + g]
                        dot0 = dot1 = dot2 = dot3 = np.float32(0)
                        for d in range(dim):
                            dot0 += query[d] * as_float(key0[d])
                            dot1 += query[d] * as_float(key1[d])
                            dot2 += query[d] * as_float(key2[d])
                            dot3 += query[d] * as_float(key3[d])
                        logits[g, i], logits[g, i + 1] = dot0, dot1
                        logits[g, i + 2], logits[g, i + 3] = dot2, dot3
                for i in range(whole, count):
                    key = k[slots[tile + i], kv_head]
                    for g in range(group):
                        query = queries[first_head + g]
                        dot = np.float32(0)
                        for d in range(dim):
                            dot += query[d] * as_float(key[d])
                        logits[g, i] = dot
                prefetch_heads(v, next_slots, next_begin, next_end, kv_head)
                for g in range(group):
                    head = first_head + g
                    row, total = logits[g], sums[head]
                    highest = most[head]
                    for i in range(count):
                        highest = max(highest, row[i])
                    factor = negative_exp(most[head] - highest)
                    most[head] = highest
                    added = np.float32(0)
                    for i in range(count):
                        power = negative_exp(row[i] - highest)
                        row[i] = power
                        added += power
                    weight[head] = weight[head] * factor + added
                    for d in range(dim):
                        total[d] *= factor
                for i in range(0, whole, 4):
                    value0, value1 = (
                        v[slots[tile + i], kv_head],
                        v[slots[tile + i + 1], kv_head],
                    )
                    value2, value3 = (
                        v[slots[tile + i + 2], kv_head],
                        v[slots[tile + i + 3], kv_head],
                    )
                    for g in range(group):
                        total = sums[first_head + g]
                        power0, power1 = logits[g, i], logits[g, i + 1]
                        power2, power3 = logits[g, i + 2], logits[g, i + 3]
                        for d in range(dim):
                            total[d] += (
                                power0 * as_float(value0[d])
                                + power1 * as_float(value1[d])
                                + power2 * as_float(value2[d])
                                + power3 * as_float(value3[d])
                            )
                for i in range(whole, count):
                    value = v[slots[tile + i], kv_head]
                    for g in range(group):
                        power, total = logits[g, i], sums[first_head + g]
                        for d in range(dim):
                            total[d] += power * as_float(value[d])
        for head in range(heads):
            for d in range(dim):
                out[b, head, d] = sums[head, d] / weight[head]


@parallel
def _attend_parts(  # type: ignore[no-untyped-def]
    q, k, v, table, rows, tokens, begin, end, scale, out, lse, cuts
):
    for part in prange(len(cuts) - 1):
        _attend(
            q, k, v, table, rows, tokens, begin, end, scale, out, lse,
            cuts[part], cuts[part + 1],
        )  # fmt: skip


def attend_decodes(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    table: np.ndarray,
    rows: np.ndarray,
    tokens: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    scale: float,
    out: np.ndarray,
    lse: np.ndarray,
) -> None:
    """Attention of single tokens, each to its part of the KV of its request.

    As :func:`.block_attention.attend_blocks`, but:

    Args:
        rows: int64, the row of each of the tokens' requests.
        lse: is not written.
    """
    arrays = (
        q, k_cache, v_cache, table, rows, tokens, begin, end, np.float32(scale), out, lse,
    )  # fmt: skip
    pairs = np.cumsum((end - begin)[tokens])
    most = int(pairs[-1]) * q[0].size // _PART if len(tokens) else 0
    in_parts(_attend, _attend_parts, arrays, len(tokens), most, pairs)
