"""Values of Python as JSON that gives back exactly what went in.

Plain JSON turns tuples into lists and knows no bytes; here what it lacks is an object
with one name that begins with ``$``, such as ``{"$tuple": [1, 2]}``.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import numpy as np


def to_plain(value: Any, other: Callable[[Any], Any]) -> Any:
    """Rewrite a value as what JSON can hold.

    Args:
        value: None, a bool, number, text, bytes, list, tuple or dict, nested at will.
        other: rewrites what is none of these, or raises.
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
    """The value that :func:`to_plain` rewrote."""
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
