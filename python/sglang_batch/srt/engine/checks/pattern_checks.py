"""Patterns and grammars that would keep the scheduler busy for hours, or end it."""

from __future__ import annotations

import re
import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import sre_parse

# SGLang matches a stop pattern against the answer after each token.
MAX_UNBOUNDED = 3
MAX_REPEATS = 8
# xgrammar reads grammars recursively.
MAX_GRAMMAR_LEN = 1 << 18
MAX_GRAMMAR_DEPTH = 100
# A repeated part is written out as often as it may occur.
MAX_GRAMMAR_REPEATS = 10_000

_REPEATS = (sre_parse.MAX_REPEAT, sre_parse.MIN_REPEAT, sre_parse.POSSESSIVE_REPEAT)
_COUNT = re.compile(r"\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}", re.ASCII)


def check_pattern(pattern: str) -> str | None:
    """The fault of a ``stop_regex``, or None.

    Python backtracks: repeats within repeats, and many of them in a row, can take longer
    than anybody waits.
    """
    try:
        parsed = sre_parse.parse(pattern)
        repeats = list(_repeats(parsed))
    except (re.error, OverflowError, RecursionError) as error:
        return f"it is not a regular expression ({error})"
    if any(nested for nested, _ in repeats):
        return "it repeats a part that has repeats or alternatives of its own"
    unbounded = sum(most == sre_parse.MAXREPEAT for _, most in repeats)
    if unbounded > MAX_UNBOUNDED or len(repeats) > MAX_REPEATS:
        return (
            f"it has more than {MAX_UNBOUNDED} unlimited repeats, or more than "
            f"{MAX_REPEATS} repeats"
        )
    return None


def _repeats(parsed: Any) -> list[tuple[bool, int]]:
    """Each repeat of a varying number: whether its part varies too, and the most."""
    found: list[tuple[bool, int]] = []
    for kind, value in parsed:
        inner = [each for part in _parts(value) for each in _repeats(part)]
        if kind in _REPEATS:
            low, high, part = value
            if low != high or inner:
                varies = bool(inner) or _has_branch(part)
                found.append((varies and high > 1, int(high)))
        found += inner
    return found


def _has_branch(parsed: Any) -> bool:
    return any(
        kind == sre_parse.BRANCH or any(_has_branch(part) for part in _parts(value))
        for kind, value in parsed
    )


def _parts(value: object) -> list[sre_parse.SubPattern]:
    """The patterns within the argument of an operation."""
    if isinstance(value, sre_parse.SubPattern):
        return [value]
    if isinstance(value, (tuple, list)):
        return [part for item in value for part in _parts(item)]
    return []


def check_grammar(grammar: str) -> str | None:
    """The fault of a JSON schema, regular expression or EBNF, or None."""
    if len(grammar) > MAX_GRAMMAR_LEN:
        return f"it has {len(grammar)} characters; the most are {MAX_GRAMMAR_LEN}"
    depth = most = 0
    for character in grammar:
        if character in "([{":
            depth += 1
            most = max(most, depth)
        elif character in ")]}":
            depth -= 1
    if most > MAX_GRAMMAR_DEPTH:
        return f"it is nested {most} deep; the most is {MAX_GRAMMAR_DEPTH}"
    counts = [int(n[:12]) for pair in _COUNT.findall(grammar) for n in pair if n]
    if any(count > MAX_GRAMMAR_REPEATS for count in counts):
        return f"it repeats {max(counts)} times; the most are {MAX_GRAMMAR_REPEATS}"
    return None
