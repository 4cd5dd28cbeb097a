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


def check_dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Raise a ValueError unless the tensor has one of the allowed dtypes."""
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype) for dtype in allowed)
        raise ValueError(f"{name} is {tensor.dtype}; convert it to {names}")


def check_shape(name: str, tensor: torch.Tensor, *shape: int | None) -> None:
    """Raise a ValueError unless the shape matches. None matches any size."""
    sizes = tuple(tensor.shape)
    if len(sizes) != len(shape) or any(
        want is not None and want != size
        for want, size in zip(shape, sizes, strict=True)
    ):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} has shape {list(sizes)}; expected [{wanted}]")


def check_rows(name: str, tensor: torch.Tensor, num_rows: int) -> None:
    """Raise a ValueError if the first dimension holds fewer than ``num_rows``."""
    if tensor.shape[0] < num_rows:
        raise ValueError(
            f"{name} has {tensor.shape[0]} rows; this batch needs {num_rows}"
        )


def check_last_stride(name: str, tensor: torch.Tensor) -> None:
    """Raise a ValueError unless the last dimension is contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension; "
            "pass it with a contiguous last dimension"
        )


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise a ValueError unless the tensor is on the given device."""
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
