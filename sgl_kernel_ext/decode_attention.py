"""Attention of single tokens on a CPU, compiled with numba: each reads its KV where it is.

A token may have attended to a part of its KV already, a prefix that several requests read
together. The rest continues from that result, by its log-sum-exp.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from .host_kernels import (
    in_parts,
    jit,
    negative_exp,
    parallel,
    prefetch_heads,
    rounded,
)
from .vector_products import (
    LANES,
    add_places,
    copy_values,
    memory,
    multiply_places,
    numbers,
    put_values,
)

# Tokens whose logits are computed before the softmax continues. Meanwhile the next tile is
# loaded: the KV of a step is larger than a cache, and its slots are nowhere near each other.
_TILE = 32
# Bytes between the rows of a head from which on too many of a tile are in the same places of the
# first cache: then a tile has half as many.
_FAR = 2048
_LOWEST = np.float32(-1e30)
# Products of a query and a key that another thread is worth: some 25 us of work.
_PART = 1 << 17


@jit
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, table, rows, tokens, begin, end, scale, out, lse, first, last
):
    """Attention of a range of the tokens, as :func:`attend_decodes`."""
    heads, dim = q.shape[1], q.shape[2]
    group = heads // k.shape[1]
    weights = numbers(memory(q, k, v, _TILE))
    size = weights.itemsize
    # A key is a row of numbers, filled up to whole vectors. A row of V has 32 bits for each
    # number: a float32, or those of two positions.
    key_vectors = (dim * size + 4 * LANES - 1) // (4 * LANES)
    value_vectors = (dim + LANES - 1) // LANES
    key_width, width = key_vectors * 4 * LANES // size, value_vectors * LANES
    queries = numbers(memory(q, k, v, heads * key_width))
    keys = numbers(memory(q, k, v, _TILE * key_width))
    values = memory(q, k, v, _TILE * width)
    # Whether the rows are read where the cache has them. Else they are copied.
    k_is_row = k.strides[2] == k.itemsize == size and dim == key_width
    v_is_row = v.strides[2] == v.itemsize == size == 4 and dim == width
    step = _TILE if k.strides[0] < _FAR else _TILE // 2
    sums = np.zeros((heads, width), np.float32)
    logits = np.empty((group, _TILE), np.float32)
    places, keys_at, values_at = np.empty((3, _TILE), np.int64)
    most = np.empty(heads, np.float32)
    weight = np.empty(heads, np.float32)
    for at in range(first, last):
        slots, b = table[rows[at]], tokens[at]
        for head in range(heads):
            known = lse[b, head] > _LOWEST
            most[head] = lse[b, head] if known else _LOWEST
            weight[head] = 1.0 if known else 0.0
            copy_values(q[b, head], queries[head * key_width :])
            for d in range(dim):
                sums[head, d] = out[b, head, d] if known else np.float32(0)
        for tile in range(begin[b], end[b], step):
            count = min(step, end[b] - tile)
            next_slots, next_begin, next_end = slots, tile + step, end[b]
            if next_begin >= next_end and at + 1 < last:
                next_slots, following = table[rows[at + 1]], tokens[at + 1]
                next_begin, next_end = begin[following], end[following]
            next_end = min(next_end, next_begin + step)
            # Whole vectors of keys, and an even number of rows of V: the last one is repeated.
            scored = (count + LANES - 1) // LANES * LANES
            added = (count + 3) // 4 * 4
            for i in range(scored):
                slot = np.int64(slots[tile + min(i, count - 1)])
                keys_at[i] = k.ctypes.data + slot * k.strides[0]
                values_at[i] = v.ctypes.data + slot * v.strides[0]
            for kv_head in range(k.shape[1]):
                first_head = kv_head * group
                for i in range(scored):
                    places[i] = keys_at[i] + kv_head * k.strides[1]
                if not k_is_row:
                    for i in range(scored):
                        key = k[slots[tile + min(i, count - 1)], kv_head]
                        copy_values(key, keys[i * key_width :])
                        places[i] = keys.ctypes.data + i * key_width * size
                for g in range(group):
                    prefetch_heads(
                        k, next_slots, next_begin, next_end, kv_head, g, group
                    )
                    query = queries.ctypes.data + (first_head + g) * key_width * size
                    for i in range(0, scored, LANES):
                        multiply_places(
                            keys, places.ctypes.data + 8 * i, query,
                            logits[g].ctypes.data + 4 * i, key_vectors,
                        )  # fmt: skip
                for i in range(scored):
                    places[i] = values_at[i] + kv_head * v.strides[1]
                if not v_is_row:
                    for i in range(0, added, 2):
                        put_values(
                            v[slots[tile + min(i, count - 1)], kv_head],
                            v[slots[tile + min(i + 1, count - 1)], kv_head],
                            values[i * size // 4 * width :], width,
                        )  # fmt: skip
                    for i in range(added * size // 4):
                        places[i] = values.ctypes.data + i * width * 4
                for g in range(group):
                    head, row = first_head + g, logits[g]
                    prefetch_heads(
                        v, next_slots, next_begin, next_end, kv_head, g, group
                    )
                    highest = most[head]
                    for i in range(count, scored):
                        row[i] = _LOWEST
                    for i in range(scored):
                        row[i] *= scale
                        highest = max(highest, row[i])
                    factor = negative_exp(most[head] - highest)
                    most[head] = highest
                    total = np.float32(0)
                    for i in range(scored):
                        power = negative_exp(row[i] - highest)
                        weights[i] = rounded(power, weights)
                        total += power
                    weight[head] = weight[head] * factor + total
                    add_places(
                        keys, weights.ctypes.data, places.ctypes.data, added * size // 4,
                        sums[head].ctypes.data, value_vectors, factor,
                    )  # fmt: skip
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
