"""Times and rates in units that fit their size, for tables and figures."""

from __future__ import annotations

import math
from typing import NamedTuple

SIGNIFICANT = 4


class TimeUnit(NamedTuple):
    """A unit of time. ``seconds`` is its length."""

    name: str
    seconds: float

    def number(self, seconds: float) -> str:
        """A time in this unit, without the unit's name."""
        return significant(seconds / self.seconds)

    def text(self, seconds: float) -> str:
        """A time in this unit."""
        return f"{self.number(seconds)} {self.name}"


_UNITS = (TimeUnit("h", 3600.0), TimeUnit("s", 1.0), TimeUnit("ms", 1e-3))
_SMALLEST = TimeUnit("\u00b5s", 1e-6)
# Times below this many hours are easier to compare in seconds.
_LEAST_HOURS = 3.0


def time_unit(seconds: float) -> TimeUnit:
    """The unit for times up to this one: hours, seconds, ms or µs."""
    for unit in _UNITS:
        least = _LEAST_HOURS if unit.name == "h" else 1.0
        if seconds >= least * unit.seconds or not math.isfinite(seconds):
            return unit
    return _SMALLEST if seconds else _UNITS[1]


def time_text(seconds: float) -> str:
    """A time in the unit that fits it."""
    return time_unit(seconds).text(seconds)


def rate_text(per_second: float) -> str:
    """A number of things per second, without their name."""
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if per_second >= size:
            return f"{_three_digits(per_second / size)} {name}"
    return f"{per_second:,.0f}" if per_second >= 100 else significant(per_second)


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def significant(value: float) -> str:
    """A number with ``SIGNIFICANT`` digits or more, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = SIGNIFICANT - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(decimals, 0), 9)}f}"
