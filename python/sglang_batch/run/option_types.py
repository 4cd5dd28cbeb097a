"""Types of option values: each parses one argument or refuses it with a reason."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number in ASCII digits, from ``least`` to ``most``."""
    span = f"of {least} or more" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text) if text.isascii() else least - 1
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise ArgumentTypeError(f"{text!r} must be a whole number {span}")
        return value

    return parse


count = whole(1)


def number(text: str) -> float:
    """A number, or NaN for any other text, such as digits of other scripts."""
    try:
        return float(text) if text.isascii() else math.nan
    except ValueError:
        return math.nan


def positive(text: str) -> float:
    value = number(text)
    if not (math.isfinite(value) and value > 0):
        raise ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def at_least_0(text: str) -> float:
    value = number(text)
    if not (math.isfinite(value) and value >= 0):
        raise ArgumentTypeError(f"{text!r} must be a number of 0 or more")
    return value


def share(text: str) -> float:
    value = number(text)
    if not 0 <= value <= 1:
        raise ArgumentTypeError(f"{text!r} must be a number from 0 to 1")
    return value


def positive_share(text: str) -> float:
    value = share(text)
    if value == 0:
        raise ArgumentTypeError(f"{text!r} must be above 0")
    return value


def enough(text: str) -> float:
    """A share above 0, also as a percentage such as 99%."""
    value = number(text.removesuffix("%"))
    if text.endswith("%"):
        value /= 100
    if not 0 < value <= 1:
        raise ArgumentTypeError(
            f"{text!r} must be a share above 0 and at most 1, such as 0.99 or 99%"
        )
    return value


def exponent(text: str) -> float:
    value = number(text)
    if not value >= 1:
        raise ArgumentTypeError(
            f"{text!r} must be 1 (no overlap) or more; inf is perfect overlap"
        )
    return value
