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
def _are_within(positions, size):  # type: ignore[no-untyped-def]
    return positions.min() >= 0 and positions.max() < size


def _values(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """All values of a contiguous tensor, one after the other, as numba reads them."""
    return array(x).reshape(-1)


def _run(
    kernel: Callable[..., None],
    parts: Callable[..., None],
    given: tuple[Any, ...],
    x: torch.Tensor,
) -> None:
    """Call a kernel for the rows of a tensor."""
    values = x.numel()
    in_parts(kernel, parts, given, values // max(1, x.shape[-1]), values // _PART)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of a contiguous ``[..., 2 * width]`` with gates first: ``[..., width]``."""
    width = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], width))
    given = (_values(x), _values(out), width)
    _run(_silu_and_mul, _silu_and_mul_parts, given, out)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """``x / sqrt(mean(x ** 2) + epsilon) * weight`` of a contiguous ``[..., width]``."""
    width = x.shape[-1]
    out = torch.empty_like(x)
    given = (_values(x), _values(weight), np.float32(epsilon), _values(out), width)
    _run(_rms_norm, _rms_norm_parts, given, x)
    return out


def add_rms_norm_(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    """Add ``x`` to ``residual``, and put the :func:`rms_norm` of the sum in place of ``x``.

    x, residual: contiguous ``[..., width]``. The norm is that of the sum before it is rounded.
    """
    width = x.shape[-1]
    given = (_values(x), _values(residual), _values(weight), np.float32(epsilon), width)
    _run(_add_rms_norm, _add_rms_norm_parts, given, x)


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
    if not _are_within(positions.numpy(), len(table)):
        raise IndexError("a position is not in the table of angles")
    stride = x.stride(0)
    flat = x.as_strided(((n - 1) * stride + width,), (1,))
    given = (
        _values(flat), stride, width // dim, dim, positions.numpy(), array(table), halves,
    )  # fmt: skip
    _run(_rotate, _rotate_parts, given, x)
