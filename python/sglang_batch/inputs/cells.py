"""Cells of a table as JSON values and as text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np

from ..errors import InputError


class NotJson(ValueError):
    """A value that JSON cannot hold. The message names its type."""


def json_value(value: Any) -> Any:
    """A cell as a JSON value.

    Missing values and NaN become null. Dates, times and decimals become strings, so
    that no digit is lost. numpy's values become Python's, its arrays lists. Raises
    NotJson for bytes, infinity, or an unsupported type.
    """
    if isinstance(value, str | int):
        return value
    # pandas has missing values of its own, of which one is a date.
    if value is None or type(value).__name__ in ("NaTType", "NAType"):
        return None
    if isinstance(value, float):
        if math.isinf(value):
            raise NotJson("infinity, which JSON cannot hold")
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {_key(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, Decimal | UUID | timedelta):
        return str(value)
    if isinstance(value, np.ndarray):
        times = value.ndim and value.dtype.kind in "mM"  # numbers, in a list
        return json_value(list(value) if times else value.tolist())
    if isinstance(value, np.datetime64 | np.timedelta64) and type(value.item()) is int:
        micros = value.astype(f"{value.dtype.kind}8[us]")  # Python has no nanoseconds
        return json_value(micros.item()) if micros == value else str(value)
    if isinstance(value, np.float32 | np.float16):
        return json_value(float(str(value)))  # the shortest that is the same
    if isinstance(value, np.generic) and not isinstance(
        plain := value.item(), np.generic
    ):
        return json_value(plain)
    if isinstance(value, bytes | bytearray | memoryview):
        raise NotJson("bytes; write them as text first, such as base64 in a data: URL")
    raise NotJson(f"a {type(value).__name__}, which JSON cannot hold")


def _key(key: Any) -> str:
    return key if isinstance(key, str) else text_of(key)


def text_of(value: Any) -> str:
    """A cell in a longer string: itself, empty for None and NaN, or JSON."""
    found = json_value(value)
    if found is None:
        return ""
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def cell_text(value: Any) -> str:
    """As :func:`text_of`, and what JSON cannot hold as Python writes it."""
    try:
        return text_of(value)
    except (NotJson, RecursionError):
        return str(value)


def value_in(row: Mapping[str, Any], column: str) -> Any:
    """A cell as a JSON value. Raises InputError with its column if JSON cannot hold it."""
    try:
        return json_value(row[column])
    except NotJson as error:
        raise InputError(f"column {column!r} holds {error}") from None
