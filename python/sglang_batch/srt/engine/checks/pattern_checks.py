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

# Fields whose empty or zero value means what nobody wants, see :func:`check_literal`.
STOP_TEXTS = ("stop", "stop_sequences")
TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")

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


def check_literal(name: str, value: object) -> str | None:
    """The fault of an empty value that SGLang takes as it is, or None.

    A template makes one of an empty column. Each line would have an answer, of one token or
    of as many as fit, and count as completed.

    Args:
        name: of the field, by SGLang or by an endpoint.
    """
    values = value if isinstance(value, list) else [value]
    texts = [each for each in values if isinstance(each, str)]
    if name in STOP_TEXTS and "" in texts:
        return "an empty text ends each answer at its first token; leave it out"
    if name == "stop_regex" and any(_matches_nothing(each) for each in texts):
        return (
            "a pattern that matches the empty text ends each answer at its first token; "
            "leave it out, or have it match at least one character"
        )
    if name == "top_k" and value == 0:
        return "0 leaves no token; use -1 for all of them"
    if name in TOKEN_LIMITS and value == 0:
        return "0 is no limit of an answer; use 1 or more, or leave it out"
    return None


def _matches_nothing(pattern: str) -> bool:
    try:
        return re.search(pattern, "") is not None
    except (re.error, OverflowError, RecursionError):
        return False  # it has another fault


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
