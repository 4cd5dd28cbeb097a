"""What SGLang's code asks of an accelerator without asking whether there is one.

That for LoRA adapters asks torch for pinned memory, for which torch raises; ordinary memory
is what that code needs. That for memory on the host registers it with CUDA, also where no
device copies from there. That of some models asks for the current device, which would be
CUDA's wherever torch is built for CUDA.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

# Modules that ask for pinned memory.
_MODULES = ("sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend")


_FUNCTIONS = ("empty", "zeros", "tensor")


class _PageableTorch:
    """torch, for one module: requests for pinned memory are such for ordinary memory."""

    def __init__(self) -> None:
        for name in _FUNCTIONS:
            setattr(self, name, _unpinned(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def do_without() -> None:
    """Have SGLang's code do without, in this process. Later calls change nothing."""
    for name in _MODULES:
        vars(importlib.import_module(name))["torch"] = _PageableTorch()
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = allocate
    torch.Tensor.pin_memory = _itself
    torch.get_device_module = get_device_module


def allocate(
    dims: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> torch.Tensor:
    """Ordinary memory, in place of SGLang's that is registered with CUDA."""
    memory: torch.Tensor = allocator.allocate(dims, dtype=dtype, device=device)
    return memory


def _unpinned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(function)
    def unpinned(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return unpinned


def _itself(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    return tensor


@cache  # as torch's, of which torch.compile asks for the function within
def get_device_module(device: torch.device | str | None = None) -> Any:
    """torch's, for which the current device is the CPU."""
    name = "cpu" if device is None else torch.device(device).type
    return getattr(torch, name)
