"""Attention of several tokens to the same KV, on a CPU, compiled with numba.

The tokens of a block, each with the heads that read the same KV head, are lanes of vectors.
So a value of K or V is loaded once for all of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import overload

from .host_kernels import (
    in_parts,
    jit,
    negative_exp,
    parallel,
    prefetch_heads,
    rounded,
)
from .vector_products import (
    ROWS,
    SQUARE,
    add_rows,
    copy_values,
    memory,
    multiply_rows,
    numbers,
    pair,
    put_values,
    transpose,
)

# Most lanes of a block.
LANES = 128
# Keys whose logits are computed before the softmax continues. Meanwhile the next are loaded.
_TILE = 64
_LOWEST = np.float32(-1e30)
# Products of a query and a key that another thread is worth: some 25 us of work.
_PART = 1 << 19


def _put_weights(
    first: Any, second: Any, most: Any, scale: float, weight: Any, to: Any, like: Any,
    lanes: int,
) -> None:  # fmt: skip
    """Turn two rows of logits into weights, in two rows or in pairs of bfloat16, and add them
    to the sum of each lane.

    most: the highest logit of each lane, scaled.
    like: memory for the same numbers.
    """
    raise NotImplementedError("only compiled code calls it")


@overload(_put_weights, inline="always")
def _compiled_put_weights(  # type: ignore[no-untyped-def]
    first, second, most, scale, weight, to, like, lanes
):
    def put_rows(  # type: ignore[no-untyped-def]
        first, second, most, scale, weight, to, like, lanes
    ):
        behind = to[lanes:]
        for lane in range(lanes):
            a = negative_exp(first[lane] * scale - most[lane])
            b = negative_exp(second[lane] * scale - most[lane])
            weight[lane] += a + b
            to[lane], behind[lane] = a, b

    def put_pairs(  # type: ignore[no-untyped-def]
        first, second, most, scale, weight, to, like, lanes
    ):
        for lane in range(lanes):
            a = negative_exp(first[lane] * scale - most[lane])
            b = negative_exp(second[lane] * scale - most[lane])
            weight[lane] += a + b
            to[lane] = pair(rounded(a, like), rounded(b, like))

    return put_rows if to.dtype == types.float32 else put_pairs


@jit
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, table, rows, blocks, tokens, begin, end, scale, out, lse, first, last
):
    """Attention of the blocks ``first`` to ``last``, as :func:`attend_blocks`."""
    dim, group = q.shape[2], q.shape[1] // k.shape[1]
    width = (dim + SQUARE - 1) // SQUARE * SQUARE
    # K and V are copied from their slots. All else has rows of lanes, one behind the other.
    queries = memory(q, k, v, width * LANES)
    rows_of_q = numbers(memory(q, k, v, width * SQUARE))
    keys = numbers(memory(q, k, v, _TILE * width))
    values = memory(q, k, v, _TILE * width)
    weights = memory(q, k, v, _TILE * LANES)
    units = 4 // keys.itemsize  # numbers in 32 bits
    sums = np.zeros(width * LANES, np.float32)
    rows_of_sums = np.zeros(width * SQUARE, np.float32)
    logits = np.zeros(_TILE * LANES, np.float32)
    most = np.zeros(LANES, np.float32)
    weight = np.zeros(LANES, np.float32)
    factor = np.zeros(LANES, np.float32)
    token_of = np.zeros(LANES, np.int64)
    head_of = np.zeros(LANES, np.int64)  # among those of its KV head
    start = np.zeros(LANES, np.int32)
    stop = np.zeros(LANES, np.int32)
    for block in range(first, last):
        slots = table[rows[block]]
        of = tokens[blocks[block] : blocks[block + 1]]
        number = len(of) * group
        lanes = (number + SQUARE - 1) // SQUARE * SQUARE
        for lane in range(lanes):
            token = of[min(lane, number - 1) // group]
            token_of[lane], head_of[lane] = token, lane % group
            start[lane], stop[lane] = begin[token], end[token]
        lowest, highest = start[:lanes].min(), stop[:lanes].max()
        seen_from, seen_to = start[:lanes].max(), stop[:lanes].min()
        for kv_head in range(k.shape[1]):
            sums[: width * lanes] = np.float32(0)
            for lane in range(lanes):
                token, head = token_of[lane], kv_head * group + head_of[lane]
                known = lse[token, head] > _LOWEST
                most[lane] = lse[token, head] if known else _LOWEST
                weight[lane] = 1.0 if known else 0.0
                if known:
                    for d in range(dim):
                        sums[d * lanes + lane] = out[token, head, d]
                at = lane % SQUARE
                copy_values(q[token, head], rows_of_q[at * width * units :])
                if at == SQUARE - 1:
                    to = queries.ctypes.data + (lane - at) * 4
                    for d in range(0, dim // units, SQUARE):
                        transpose(
                            rows_of_q.ctypes.data + d * 4, width * 4,
                            to + d * lanes * 4, lanes * 4,
                        )  # fmt: skip
            for tile in range(lowest, highest, _TILE):
                tile_end = min(tile + _TILE, highest)
                count = (tile_end - tile + ROWS - 1) // ROWS * ROWS
                for i in range(count):
                    key = k[slots[min(tile + i, highest - 1)], kv_head]
                    copy_values(key, keys[i * dim : (i + 1) * dim])
                next_end = min(tile_end + _TILE, highest)
                prefetch_heads(k, slots, tile_end, next_end, kv_head, 0, 1)
                for i in range(0, count, ROWS):
                    multiply_rows(
                        keys, keys.ctypes.data + i * dim * keys.itemsize, dim * keys.itemsize, 4,
                        queries.ctypes.data, lanes * 4, logits.ctypes.data + i * lanes * 4,
                        dim // units, lanes,
                    )  # fmt: skip
                prefetch_heads(v, slots, tile_end, next_end, kv_head, 0, 1)
                for lane in range(lanes):
                    factor[lane] = most[lane]
                for i in range(count):
                    row = logits[i * lanes : (i + 1) * lanes]
                    key_at = np.int32(tile + i)
                    if key_at < seen_from or key_at >= seen_to:
                        for lane in range(lanes):
                            sees = (start[lane] <= key_at) & (key_at < stop[lane])
                            row[lane] = row[lane] if sees else _LOWEST
                    for lane in range(lanes):
                        most[lane] = max(most[lane], row[lane] * scale)
                for lane in range(lanes):
                    factor[lane] = negative_exp(factor[lane] - most[lane])
                    weight[lane] *= factor[lane]
                for i in range(0, count, 2):
                    _put_weights(
                        logits[i * lanes : (i + 1) * lanes],
                        logits[(i + 1) * lanes : (i + 2) * lanes],
                        most, scale, weight, weights[i // units * lanes :], keys, lanes,
                    )  # fmt: skip
                    put_values(
                        v[slots[min(tile + i, highest - 1)], kv_head],
                        v[slots[min(tile + i + 1, highest - 1)], kv_head],
                        values[i // units * width :], width,
                    )  # fmt: skip
                for d in range(0, width, ROWS):
                    add_rows(
                        values, values.ctypes.data + d * 4, 4, width * 4, weights.ctypes.data,
                        lanes * 4, sums.ctypes.data + d * lanes * 4, count // units, lanes,
                        factor.ctypes.data,
                    )  # fmt: skip
            for lane in range(number):
                token, head = token_of[lane], kv_head * group + head_of[lane]
                lse[token, head] = most[lane] + np.log(weight[lane])
                at = lane % SQUARE
                if at == 0:
                    for d in range(0, width, SQUARE):
                        transpose(
                            sums.ctypes.data + (d * lanes + lane) * 4, lanes * 4,
                            rows_of_sums.ctypes.data + d * 4, width * 4,
                        )  # fmt: skip
                share, result = np.float32(1) / weight[lane], out[token, head]
                for d in range(dim):
                    result[d] = rows_of_sums[at * width + d] * share


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
