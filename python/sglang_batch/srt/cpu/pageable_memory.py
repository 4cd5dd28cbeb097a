"""Pinned memory where there is nothing to pin it for.

Some of SGLang's code asks torch for pinned memory without asking whether there is any, such
as that of LoRA adapters. Without an accelerator torch raises. Ordinary memory is what that
code needs there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils._device import _device_constructors

_FUNCTIONS = ("tensor", "empty", "zeros")


def use_pageable_memory() -> None:
    """Have torch take requests for pinned memory as such for ordinary memory.

    For a process without an accelerator. Later calls do nothing.
    """
    # ``with torch.device(...)`` knows constructors by identity, as they are when it is
    # first used.
    _device_constructors()
    for name in _FUNCTIONS:
        function = getattr(torch, name)
        if not hasattr(function, "__wrapped__"):
            setattr(torch, name, _unpinned(function))
    torch.Tensor.pin_memory = _itself


def _unpinned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(function)
    def unpinned(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return unpinned


def _itself(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    return tensor
