"""Pinned memory where there is nothing to pin it for.

SGLang's code for LoRA adapters asks torch for pinned memory without asking whether there is
any. Without an accelerator torch raises. Ordinary memory is what that code needs there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

# Modules that ask for it.
_MODULES = ("sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend")


_FUNCTIONS = ("empty", "zeros", "tensor")


class _PageableTorch:
    """torch, for one module: requests for pinned memory are such for ordinary memory."""

    def __init__(self) -> None:
        for name in _FUNCTIONS:
            setattr(self, name, _unpinned(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def use_pageable_memory() -> None:
    """Have SGLang's code for adapters do without pinned memory.

    For a process without an accelerator. Later calls do nothing.
    """
    for name in _MODULES:
        vars(importlib.import_module(name))["torch"] = _PageableTorch()
    torch.Tensor.pin_memory = _itself


def _unpinned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(function)
    def unpinned(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return unpinned


def _itself(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    return tensor
