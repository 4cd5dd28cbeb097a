"""Checks of tensors for all ops, whose messages show shapes and never data, and the
compiler of functions that run on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba
import torch
from triton.runtime import JITFunction

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    num_rows: int = 0,
) -> None:
    """Check a tensor whose last dimension has to be contiguous.

    Args:
        shape: None matches any size.
        num_rows: the least size of the first dimension.

    Raises:
        ValueError: the tensor has another shape, dtype, stride or device.
    """
    sizes = tuple(tensor.shape)
    matches = len(sizes) == len(shape) and all(
        want in (None, size) for want, size in zip(shape, sizes, strict=True)
    )
    if not matches:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} has shape {list(sizes)}; expected [{wanted}]")
    if sizes[0] < num_rows:
        raise ValueError(f"{name} has {sizes[0]} rows; this batch needs {num_rows}")
    if tensor.dtype not in dtypes:
        names = ", ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} is {tensor.dtype}; convert it to {names}")
    if sizes[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension; "
            "pass it with a contiguous last dimension"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; move it to {device}")


def check_runnable(kernel: object, device: torch.device, instead: str) -> None:
    """Raise a ValueError for a compiled kernel with tensors on the CPU."""
    if device.type == "cpu" and isinstance(kernel, JITFunction):
        raise ValueError(f"Triton has no CPU backend; on CPU tensors use {instead}")


F = TypeVar("F", bound=Callable[..., object])


def jit(function: F) -> F:
    """Compile with numba on first use and cache the machine code on disk.

    A compiled function may only call compiled functions of its own file: numba checks
    only that file to see whether the cached code is stale.
    """
    compiled: F = numba.njit(cache=True)(function)
    return compiled
