"""Attention of several tokens to the same KV, on a CPU, compiled with numba.

The tokens of a block, each with the heads that read the same KV head, are lanes of vectors.
So a value of K or V is loaded once for all of them, from where it is in the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import overload

from .bfloat_pairs import HAS_PAIRS, add_pairs
from .host_kernels import (
    as_float,
    in_parts,
    inlined,
    jit,
    negative_exp,
    parallel,
    rounded,
)

# Most lanes of a block, and those of the widest vectors.
LANES, _VECTOR = 128, 16
# Keys whose logits are computed before the softmax continues.
_TILE = 64
_LOWEST = np.float32(-1e30)
# Products of a query and a key that another thread is worth: some 25 us of work.
_PART = 1 << 19
# Indices of vectors are unsigned: numba lets signed ones count from the end.
_ZERO, _ONE, _TWO, _THREE, _FOUR = (np.uint64(i) for i in range(5))
_ROW, _ROW2, _ROW3 = (np.uint64(i * LANES) for i in (1, 2, 3))


@inlined
def _four(x, at):  # type: ignore[no-untyped-def]
    """Four values from ``at`` on."""
    return (
        as_float(x[at]),
        as_float(x[at + _ONE]),
        as_float(x[at + _TWO]),
        as_float(x[at + _THREE]),
    )


@inlined
def _heads(cache, slots, at, last, head):  # type: ignore[no-untyped-def]
    """A KV head at four positions, of which those after the last are the last again."""
    return (
        cache[slots[at], head],
        cache[slots[min(at + 1, last)], head],
        cache[slots[min(at + 2, last)], head],
        cache[slots[min(at + 3, last)], head],
    )


@inlined
def _multiply(key0, key1, key2, key3, queries, logits, row, dim, lanes):  # type: ignore[no-untyped-def]
    """Logits of four keys, in rows of lanes from ``row`` on."""
    for lane in range(row, row + lanes):
        logits[lane] = logits[lane + _ROW] = np.float32(0)
        logits[lane + _ROW2] = logits[lane + _ROW3] = np.float32(0)
    for d in range(_ZERO, dim, _FOUR):
        a0, a1, a2, a3 = _four(key0, d)
        b0, b1, b2, b3 = _four(key1, d)
        c0, c1, c2, c3 = _four(key2, d)
        d0, d1, d2, d3 = _four(key3, d)
        for lane in range(_ZERO, lanes):
            x, y = d * _ROW + lane, row + lane
            q0, q1 = queries[x], queries[x + _ROW]
            q2, q3 = queries[x + _ROW2], queries[x + _ROW3]
            sum0 = logits[y] + (a0 * q0 + a1 * q1 + a2 * q2 + a3 * q3)
            sum1 = logits[y + _ROW] + (b0 * q0 + b1 * q1 + b2 * q2 + b3 * q3)
            sum2 = logits[y + _ROW2] + (c0 * q0 + c1 * q1 + c2 * q2 + c3 * q3)
            sum3 = logits[y + _ROW3] + (d0 * q0 + d1 * q1 + d2 * q2 + d3 * q3)
            logits[y], logits[y + _ROW] = sum0, sum1
            logits[y + _ROW2], logits[y + _ROW3] = sum2, sum3


@inlined
def _add(value0, value1, value2, value3, weights, sums, row, dim, lanes):  # type: ignore[no-untyped-def]
    """Add four values by their weights, which are in rows of lanes from ``row`` on."""
    for d in range(_ZERO, dim, _FOUR):
        a0, a1, a2, a3 = _four(value0, d)
        b0, b1, b2, b3 = _four(value1, d)
        c0, c1, c2, c3 = _four(value2, d)
        d0, d1, d2, d3 = _four(value3, d)
        for lane in range(_ZERO, lanes):
            x, y = row + lane, d * _ROW + lane
            w0, w1 = weights[x], weights[x + _ROW]
            w2, w3 = weights[x + _ROW2], weights[x + _ROW3]
            sum0 = sums[y] + (a0 * w0 + b0 * w1 + c0 * w2 + d0 * w3)
            sum1 = sums[y + _ROW] + (a1 * w0 + b1 * w1 + c1 * w2 + d1 * w3)
            sum2 = sums[y + _ROW2] + (a2 * w0 + b2 * w1 + c2 * w2 + d2 * w3)
            sum3 = sums[y + _ROW3] + (a3 * w0 + b3 * w1 + c3 * w2 + d3 * w3)
            sums[y], sums[y + _ROW] = sum0, sum1
            sums[y + _ROW2], sums[y + _ROW3] = sum2, sum3


def _queries(q: Any, k: Any, v: Any, dim: int) -> Any:
    """The queries of a block: of each value, or of each pair of bfloat16, its lanes."""
    raise NotImplementedError("only compiled code calls it")


@overload(_queries, inline="always")
def _compiled_queries(q, k, v, dim):  # type: ignore[no-untyped-def]
    if HAS_PAIRS and q.dtype == k.dtype == v.dtype == types.uint16:
        return lambda q, k, v, dim: np.zeros(dim // 2 * LANES, np.uint32)
    return lambda q, k, v, dim: np.zeros(dim * LANES, np.float32)


def _put(queries: Any, lane: int, query: Any, scale: float) -> None:
    """Put a query in its lane."""
    raise NotImplementedError("only compiled code calls it")


@overload(_put, inline="always")
def _compiled_put(queries, lane, query, scale):  # type: ignore[no-untyped-def]
    def put_values(queries, lane, query, scale):  # type: ignore[no-untyped-def]
        for d in range(len(query)):
            queries[d * LANES + lane] = as_float(query[d]) * scale

    def put_pairs(queries, lane, query, scale):  # type: ignore[no-untyped-def]
        for d in range(len(query) // 2):
            queries[d * LANES + lane] = _pair(query[2 * d], query[2 * d + 1])

    return put_values if queries.dtype == types.float32 else put_pairs


@inlined
def _pair(low, high):  # type: ignore[no-untyped-def]
    """Two bfloat16 as a processor multiplies them."""
    return np.uint32(low) | np.uint32(high) << np.uint32(16)


def _weigh_keys(
    k: Any, slots: Any, tile: int, count: int, last: int, kv_head: int,
    queries: Any, logits: Any, dim: int, lanes: int, scale: float,
) -> None:  # fmt: skip
    """Logits of the keys of a tile."""
    raise NotImplementedError("only compiled code calls it")


@overload(_weigh_keys, inline="always")
def _compiled_weigh_keys(  # type: ignore[no-untyped-def]
    k, slots, tile, count, last, kv_head, queries, logits, dim, lanes, scale
):
    def by_values(  # type: ignore[no-untyped-def]
        k, slots, tile, count, last, kv_head, queries, logits, dim, lanes, scale
    ):
        for i in range(0, count, 4):
            key0, key1, key2, key3 = _heads(k, slots, tile + i, last, kv_head)
            _multiply(
                key0, key1, key2, key3, queries, logits,
                np.uint64(i * LANES), np.uint64(dim), np.uint64(lanes),
            )  # fmt: skip

    def by_pairs(  # type: ignore[no-untyped-def]
        k, slots, tile, count, last, kv_head, queries, logits, dim, lanes, scale
    ):
        logits[: count * LANES] = np.float32(0)
        for i in range(0, count, 4):
            key0, key1, key2, key3 = _heads(k, slots, tile + i, last, kv_head)
            add_pairs(
                key0.ctypes.data, key1.ctypes.data, key2.ctypes.data, key3.ctypes.data,
                4, queries.ctypes.data, logits.ctypes.data + i * LANES * 4, LANES * 4,
                dim // 2, lanes // _VECTOR,
            )  # fmt: skip
        for i in range(count):
            row = logits[i * LANES : i * LANES + lanes]
            for lane in range(lanes):
                row[lane] *= scale

    return by_values if queries.dtype == types.float32 else by_pairs


def _add_values(
    v: Any, slots: Any, tile: int, count: int, last: int, kv_head: int,
    queries: Any, weights: Any, sums: Any, pairs: Any, dim: int, lanes: int,
) -> None:  # fmt: skip
    """Add the values of a tile by their weights."""
    raise NotImplementedError("only compiled code calls it")


@overload(_add_values, inline="always")
def _compiled_add_values(  # type: ignore[no-untyped-def]
    v, slots, tile, count, last, kv_head, queries, weights, sums, pairs, dim, lanes
):
    def by_values(  # type: ignore[no-untyped-def]
        v, slots, tile, count, last, kv_head, queries, weights, sums, pairs, dim, lanes
    ):
        for i in range(0, count, 4):
            value0, value1, value2, value3 = _heads(v, slots, tile + i, last, kv_head)
            _add(
                value0, value1, value2, value3, weights, sums,
                np.uint64(i * LANES), np.uint64(dim), np.uint64(lanes),
            )  # fmt: skip

    def by_pairs(  # type: ignore[no-untyped-def]
        v, slots, tile, count, last, kv_head, queries, weights, sums, pairs, dim, lanes
    ):
        values, rounded_weights = pairs[: dim * count // 2], pairs[dim * _TILE // 2 :]
        for i in range(0, count, 4):
            value0, value1, value2, value3 = _heads(v, slots, tile + i, last, kv_head)
            first = values[i // 2 * dim : (i // 2 + 1) * dim]
            second = values[(i // 2 + 1) * dim : (i // 2 + 2) * dim]
            for d in range(dim):
                first[d] = _pair(value0[d], value1[d])
            for d in range(dim):
                second[d] = _pair(value2[d], value3[d])
        for i in range(0, count, 2):
            low = weights[i * LANES : i * LANES + lanes]
            high = weights[(i + 1) * LANES : (i + 1) * LANES + lanes]
            both = rounded_weights[i // 2 * LANES : i // 2 * LANES + lanes]
            for lane in range(lanes):
                both[lane] = _pair(rounded(low[lane], v), rounded(high[lane], v))
        for d in range(0, dim, 4):
            at = values.ctypes.data + 4 * d
            add_pairs(
                at, at + 4, at + 8, at + 12, 4 * dim, rounded_weights.ctypes.data,
                sums.ctypes.data + d * LANES * 4, LANES * 4, count // 2, lanes // _VECTOR,
            )  # fmt: skip

    return by_values if queries.dtype == types.float32 else by_pairs


@inlined
def _weigh(logits, most, weight, factor, count, lanes):  # type: ignore[no-untyped-def]
    """Turn logits of ``count`` keys into weights, and add these to those of all keys before,
    which shrink by a factor where a logit is higher than theirs."""
    for lane in range(lanes):
        factor[lane] = most[lane]
    for i in range(count):
        row = logits[i * LANES : i * LANES + lanes]
        for lane in range(lanes):
            most[lane] = max(most[lane], row[lane])
    for lane in range(lanes):
        factor[lane] = negative_exp(factor[lane] - most[lane])
        weight[lane] *= factor[lane]
    for i in range(count):
        row = logits[i * LANES : i * LANES + lanes]
        for lane in range(lanes):
            row[lane] = negative_exp(row[lane] - most[lane])
            weight[lane] += row[lane]


@jit
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, table, rows, blocks, tokens, begin, end, scale, out, lse, first, last
):
    """Attention of the blocks ``first`` to ``last``, as :func:`attend_blocks`."""
    dim, group = q.shape[2], q.shape[1] // k.shape[1]
    queries = _queries(q, k, v, dim)
    # Two by two, the values of a tile and their weights, where these are multiplied so.
    pairs = np.zeros(_TILE // 2 * (dim + LANES), np.uint32)
    sums = np.zeros(dim * LANES, np.float32)
    logits = np.zeros(_TILE * LANES, np.float32)
    most = np.zeros(LANES, np.float32)
    weight = np.zeros(LANES, np.float32)
    factor = np.zeros(LANES, np.float32)
    start = np.zeros(LANES, np.int64)
    stop = np.zeros(LANES, np.int64)
    for block in range(first, last):
        slots = table[rows[block]]
        of = tokens[blocks[block] : blocks[block + 1]]
        number = len(of) * group
        lanes = (number + _VECTOR - 1) // _VECTOR * _VECTOR
        for lane in range(lanes):
            token = of[min(lane, number - 1) // group]
            start[lane], stop[lane] = begin[token], end[token]
        lowest, highest = start[:lanes].min(), stop[:lanes].max()
        seen_from, seen_to = start[:lanes].max(), stop[:lanes].min()
        for kv_head in range(k.shape[1]):
            for lane in range(lanes):
                token = of[min(lane, number - 1) // group]
                head = kv_head * group + lane % group
                known = lse[token, head] > _LOWEST
                most[lane] = lse[token, head] if known else _LOWEST
                weight[lane] = 1.0 if known else 0.0
                _put(queries, lane, q[token, head], scale)
                for d in range(dim):
                    before = out[token, head, d] if known else np.float32(0)
                    sums[d * LANES + lane] = before
            for tile in range(lowest, highest, _TILE):
                count = (min(_TILE, highest - tile) + 3) // 4 * 4
                _weigh_keys(
                    k, slots, tile, count, highest - 1, kv_head, queries, logits, dim,
                    lanes, scale,
                )  # fmt: skip
                if tile < seen_from or tile + count > seen_to:
                    for i in range(count):
                        for lane in range(lanes):
                            if not start[lane] <= tile + i < stop[lane]:
                                logits[i * LANES + lane] = _LOWEST
                _weigh(logits, most, weight, factor, count, lanes)
                for d in range(dim):
                    total = sums[d * LANES : d * LANES + lanes]
                    for lane in range(lanes):
                        total[lane] *= factor[lane]
                _add_values(
                    v, slots, tile, count, highest - 1, kv_head, queries, logits, sums,
                    pairs, dim, lanes,
                )  # fmt: skip
            for lane in range(number):
                token, head = of[lane // group], kv_head * group + lane % group
                lse[token, head] = most[lane] + np.log(weight[lane])
                for d in range(dim):
                    out[token, head, d] = sums[d * LANES + lane] / weight[lane]


@parallel
def _attend_parts(  # type: ignore[no-untyped-def]
    q, k, v, table, rows, blocks, tokens, begin, end, scale, out, lse, cuts
):
    for part in prange(len(cuts) - 1):
        _attend(
            q, k, v, table, rows, blocks, tokens, begin, end, scale, out, lse,
            cuts[part], cuts[part + 1],
        )  # fmt: skip


def attend_blocks(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    table: np.ndarray,
    rows: np.ndarray,
    blocks: np.ndarray,
    tokens: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    scale: float,
    out: np.ndarray,
    lse: np.ndarray,
) -> None:
    """Attention of tokens, each to its part of the KV that its block reads.

    Args:
        q: ``[n, num_heads, head_dim]``, as :func:`.host_kernels.array` has a tensor, as all
            values here. A head has a multiple of four.
        k_cache, v_cache: ``[num_slots, num_kv_heads, head_dim]``.
        table: int32 ``[rows, max_tokens]``, the slot of each position of a row.
        rows: int64 ``[num_blocks]``, the row that each block reads.
        blocks: int64 ``[num_blocks + 1]``, where the tokens of each block begin and end. A block
            has tokens, at most :func:`block_size`.
        tokens: int64, places in q, each at most once.
        begin, end: int64 ``[n]``, positions that each token sees, one at least.
        scale: of the logits.
        out: float32, shaped as q, overwritten. Where ``lse`` is not -inf, the attention to other
            tokens, with which the result is merged.
        lse: float32 ``[n, num_heads]``, natural logarithm of the sum of these tokens' weights,
            and then of all.
    """
    arrays = (
        q, k_cache, v_cache, table, rows, blocks, tokens, begin, end, np.float32(scale),
        out, lse,
    )  # fmt: skip
    pairs = np.cumsum((end - begin)[tokens])
    most = int(pairs[-1]) * q[0].size // _PART
    in_parts(_attend, _attend_parts, arrays, len(rows), most, pairs[blocks[1:] - 1])


def block_size(num_heads: int, num_kv_heads: int) -> int:
    """Most tokens of a block."""
    return max(1, LANES * num_kv_heads // num_heads)
