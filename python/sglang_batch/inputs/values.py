"""Values of table cells as JSON and as text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID


class NotJson(ValueError):
    """A value that JSON cannot hold; the message says which kind."""


def json_value(value: Any) -> Any:
    """What stands for a cell in JSON.

    Missing values and NaN are null; dates, times and decimals are text, so that no
    digit is lost.

    Raises:
        NotJson: bytes, infinity, or a kind of value that is not known.
    """
    if value is None or isinstance(value, str | int):
        return value
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
    if isinstance(value, bytes | bytearray | memoryview):
        raise NotJson("bytes; write them as text first, such as base64 in a data: URL")
    raise NotJson(f"a {type(value).__name__}, which JSON cannot hold")


def _key(key: Any) -> str:
    return key if isinstance(key, str) else text_of(key)


def text_of(value: Any) -> str:
    """A cell inside a longer text: text as it is, nothing for a missing value or NaN,
    JSON for the rest.

    Raises:
        NotJson: as :func:`json_value`.
    """
    found = json_value(value)
    if found is None:
        return ""
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
