"""Layers that treat each token by itself, on a CPU, compiled with numba in one pass each.

PyTorch runs each of them as a chain of operators. A decode step has so few tokens that the
calls of these take longer than their work, and for a prompt each reads and writes all tokens
again.

Tensors are float32 or bfloat16, the work is done in float32, and a result is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import prange

from .host_kernels import (
    array,
    as_float,
    in_parts,
    jit,
    negative_exp,
    parallel,
    rounded,
)

# Values that another thread is worth: some 10 us of work.
_PART = 1 << 15


@jit
def _silu_and_mul(x, out, width, first, last):  # type: ignore[no-untyped-def]
    for row in range(first, last):
        gates = x[row * 2 * width : row * 2 * width + width]
        ups = x[row * 2 * width + width : (row + 1) * 2 * width]
        outs = out[row * width : (row + 1) * width]
        for i in range(width):
            gate = as_float(gates[i])
            small = negative_exp(-abs(gate))
            numerator = np.float32(1) if gate >= 0 else small
            sigmoid = numerator / (np.float32(1) + small)
            outs[i] = rounded(gate * sigmoid * as_float(ups[i]), out)


@parallel
def _silu_and_mul_parts(x, out, width, cuts):  # type: ignore[no-untyped-def]
    for part in prange(len(cuts) - 1):
        _silu_and_mul(x, out, width, cuts[part], cuts[part + 1])


@jit
def _rms_norm(x, weight, epsilon, out, width, first, last):  # type: ignore[no-untyped-def]
    for row in range(first, last):
        values = x[row * width : (row + 1) * width]
        outs = out[row * width : (row + 1) * width]
        squares = np.float32(0)
        for i in range(width):
            squares += as_float(values[i]) * as_float(values[i])
        scale = np.float32(1) / np.sqrt(squares / np.float32(width) + epsilon)
        for i in range(width):
            outs[i] = rounded(as_float(values[i]) * scale * as_float(weight[i]), out)


@parallel
def _rms_norm_parts(x, weight, epsilon, out, width, cuts):  # type: ignore[no-untyped-def]
    for part in prange(len(cuts) - 1):
        _rms_norm(x, weight, epsilon, out, width, cuts[part], cuts[part + 1])


@jit
def _add_rms_norm(  # type: ignore[no-untyped-def]
    x, residual, weight, epsilon, width, first, last
):
    sums = np.empty(width, np.float32)
    for row in range(first, last):
        values = x[row * width : (row + 1) * width]
        added = residual[row * width : (row + 1) * width]
        squares = np.float32(0)
        for i in range(width):
            total = as_float(values[i]) + as_float(added[i])
            sums[i] = total
            squares += total * total
            added[i] = rounded(total, residual)
        scale = np.float32(1) / np.sqrt(squares / np.float32(width) + epsilon)
        for i in range(width):
            values[i] = rounded(sums[i] * scale * as_float(weight[i]), x)


@parallel
def _add_rms_norm_parts(  # type: ignore[no-untyped-def]
    x, residual, weight, epsilon, width, cuts
):
    for part in prange(len(cuts) - 1):
        _add_rms_norm(x, residual, weight, epsilon, width, cuts[part], cuts[part + 1])


@jit
def _rotate(  # type: ignore[no-untyped-def]
    x, stride, heads, dim, positions, table, halves, first, last
):
    half = table.shape[1] // 2
    for row in range(first, last):
        cosines, sines = table[positions[row], :half], table[positions[row], half:]
        for begin in range(row * stride, row * stride + heads * dim, dim):
            if halves:
                low, high = x[begin : begin + half], x[begin + half : begin + 2 * half]
                for i in range(half):
                    a, b = as_float(low[i]), as_float(high[i])
                    cosine, sine = as_float(cosines[i]), as_float(sines[i])
                    low[i] = rounded(a * cosine - b * sine, x)
                    high[i] = rounded(b * cosine + a * sine, x)
            else:
                for i in range(half):
                    a, b = as_float(x[begin + 2 * i]), as_float(x[begin + 2 * i + 1])
                    cosine, sine = as_float(cosines[i]), as_float(sines[i])
                    x[begin + 2 * i] = rounded(a * cosine - b * sine, x)
                    x[begin + 2 * i + 1] = rounded(b * cosine + a * sine, x)


@parallel
def _rotate_parts(  # type: ignore[no-untyped-def]
    x, stride, heads, dim, positions, table, halves, cuts
):
    for part in prange(len(cuts) - 1):
        _rotate(
            x, stride, heads, dim, positions, table, halves,
            cuts[part], cuts[part + 1],
        )  # fmt: skip


@jit
def _rotate_and_store(  # type: ignore[no-untyped-def]
    x, q_norm, k_norm, epsilon, positions, table, halves, q, k, v, slots, first, last
):
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    stride = (heads + 2 * kv_heads) * dim
    for row in range(first, last):
        own = x[row * stride : (row + 1) * stride]
        if len(q_norm):
            queries, keys = own[: heads * dim], own[heads * dim :]
            _rms_norm(queries, q_norm, epsilon, queries, dim, 0, heads)
            _rms_norm(keys, k_norm, epsilon, keys, dim, 0, kv_heads)
        _rotate(
            x, stride, heads + kv_heads, dim, positions, table, halves, row, row + 1
        )
        slot = slots[row]
        for head in range(heads):
            for i in range(dim):
                q[row, head, i] = own[head * dim + i]
        for head in range(kv_heads):
            key = own[(heads + head) * dim :]
            value = own[(heads + kv_heads + head) * dim :]
            for i in range(dim):
                k[slot, head, i] = key[i]
                v[slot, head, i] = value[i]


@parallel
def _rotate_and_store_parts(  # type: ignore[no-untyped-def]
    x, q_norm, k_norm, epsilon, positions, table, halves, q, k, v, slots, cuts
):
    for part in prange(len(cuts) - 1):
        _rotate_and_store(
            x, q_norm, k_norm, epsilon, positions, table, halves, q, k, v, slots,
            cuts[part], cuts[part + 1],
        )  # fmt: skip


@jit
def _are_within(positions, size):  # type: ignore[no-untyped-def]
    return positions.min() >= 0 and positions.max() < size


def values_of(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """All values of a contiguous tensor, one after the other, as numba reads them."""
    return array(x).reshape(-1)


def _run(
    kernel: Callable[..., None],
    parts: Callable[..., None],
    given: tuple[Any, ...],
    rows: int,
    width: int,
) -> None:
    """Call a kernel for rows of so many values."""
    in_parts(kernel, parts, given, rows, rows * width // _PART)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of a contiguous ``[..., 2 * width]`` with gates first: ``[..., width]``."""
    width = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], width))
    given = values_of(x), values_of(out), width
    rows = out.numel() // max(1, width)
    _run(_silu_and_mul, _silu_and_mul_parts, given, rows, width)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """``x / sqrt(mean(x ** 2) + epsilon) * weight`` of a contiguous ``[..., width]``."""
    width = x.shape[-1]
    out = torch.empty_like(x)
    given = (
        values_of(x), values_of(weight), np.float32(epsilon), values_of(out), width,
    )  # fmt: skip
    rows = x.numel() // max(1, width)
    _run(_rms_norm, _rms_norm_parts, given, rows, width)
    return out


def add_rms_norm_(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    """Add ``x`` to ``residual``, and put the :func:`rms_norm` of the sum in place of ``x``.

    x, residual: contiguous ``[..., width]``. The norm is that of the sum before it is rounded.
    """
    add_rms_norm_values(values_of(x), values_of(residual), values_of(weight), epsilon)


def add_rms_norm_values(
    x: np.ndarray, residual: np.ndarray, weight: np.ndarray, epsilon: float
) -> None:
    """:func:`add_rms_norm_` of values as :func:`values_of` has them."""
    width = len(weight)
    given = (x, residual, weight, np.float32(epsilon), width)
    rows = len(x) // max(1, width)
    _run(_add_rms_norm, _add_rms_norm_parts, given, rows, width)


def rotate_(
    x: torch.Tensor,
    dim: int,
    positions: torch.Tensor,
    table: torch.Tensor,
    halves: bool,
) -> None:
    """Rotate the heads of tokens by the angles of their positions, in place.

    Args:
        x: ``[n, num_heads * dim]``, whose rows may be further apart.
        positions: int64 ``[n]``, rows of the table.
        table: contiguous ``[most_positions, rotated]``, cosines of each pair, then its sines.
            The first ``rotated`` values of a head are rotated.
        halves: a pair is a value of the first half and one of the second (GPT-NeoX), not
            two neighbours (GPT-J).
    """
    n, width = x.shape
    if not n:
        return
    angles = array(table)
    check_positions(positions.numpy(), angles)
    stride = x.stride(0)
    flat = x.as_strided(((n - 1) * stride + width,), (1,))
    given = (
        values_of(flat), stride, width // dim, dim, positions.numpy(), angles, halves,
    )  # fmt: skip
    _run(_rotate, _rotate_parts, given, n, width)


def check_positions(positions: np.ndarray, table: np.ndarray) -> None:
    """Raise IndexError if one of the positions, at least one, is no row of the table."""
    if not _are_within(positions, len(table)):
        raise IndexError("a position is not in the table of angles")


def rotate_and_store(
    x: np.ndarray,
    norms: tuple[np.ndarray, np.ndarray, float],
    angles: tuple[np.ndarray, np.ndarray, bool],
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    slots: np.ndarray,
) -> None:
    """Norm and rotate the queries and keys of tokens, and put keys and values in the cache.

    Args:
        x: ``[n * (num_heads + 2 * num_kv_heads) * dim]``, of each token its queries, keys and
            values, as :func:`values_of` has them. Overwritten.
        norms: the weights ``[dim]`` of the norms of a head of queries and of one of keys, empty
            if there are none, and their epsilon.
        angles: positions and table of :func:`rotate_`, checked, and its ``halves``.
        q: ``[n, num_heads, dim]``, the queries, overwritten.
        k_cache, v_cache: ``[num_slots, num_kv_heads, dim]``.
        slots: int64 ``[n]``.
    """
    q_norm, k_norm, epsilon = norms
    given = (
        x, q_norm, k_norm, np.float32(epsilon), *angles, q, k_cache, v_cache, slots,
    )  # fmt: skip
    width = len(x) // max(1, len(q))
    _run(_rotate_and_store, _rotate_and_store_parts, given, len(q), width)
