"""Python values as JSON, without loss.

Types that JSON lacks, such as tuples and bytes, become objects with one key that begins
with ``$``, such as ``{"$tuple": [1, 2]}``.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import numpy as np


def to_plain(value: Any, other: Callable[[Any], Any]) -> Any:
    """Rewrite a value with the types of JSON.

    Args:
        value: None, a bool, number, string, bytes, list, tuple or dict, also nested.
        other: rewrites a value of any other type, or raises.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is list:
        return [to_plain(item, other) for item in value]
    if kind is tuple:
        return {"$tuple": [to_plain(item, other) for item in value]}
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: to_plain(item, other) for key, item in value.items()}
        pairs = [[key, item] for key, item in value.items()]
        return {"$dict": to_plain(pairs, other)}
    if isinstance(value, np.generic):
        return to_plain(value.item(), other)
    return other(value)


def from_plain(plain: Any) -> Any:
    """The value that was passed to :func:`to_plain`."""
    if isinstance(plain, list):
        return [from_plain(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        ((name, content),) = plain.items()
        if name == "$float":
            return float(content)
        if name == "$bytes":
            return base64.b64decode(content)
        if name == "$tuple":
            return tuple(from_plain(content))
        if name == "$dict":
            return {from_plain(key): from_plain(item) for key, item in content}
    return {key: from_plain(item) for key, item in plain.items()}
