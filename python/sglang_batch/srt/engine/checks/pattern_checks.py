"""Patterns and grammars that would keep the scheduler busy for hours, or end it."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
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

_UNREADABLE = (re.error, OverflowError, RecursionError)

# Fields whose empty or zero value means what nobody wants, see :func:`check_literal`.
STOP_TEXTS = ("stop", "stop_sequences")
TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# Beyond the first, xgrammar 0.2 takes a text for any that its part matches, quotes and control
# characters included: the answer is no JSON. Up to it, a repeat is written out, which takes
# a second or more.
MAX_TEXT_REPEATS = 128
MAX_ALL_TEXT_REPEATS = 512
# A repeat of nothing but a repeat divides one text in many ways: 25 take a second, 64 over
# twenty.
MAX_NESTED_TEXT_REPEATS = 25
# Characters that a JSON string has to escape.
_ESCAPED = frozenset([*range(0x20), ord('"'), ord("\\")])

# Formats of xgrammar whose strings may have them as they are.
_BARE_FORMATS = frozenset({"json-pointer", "relative-json-pointer"})
# What JavaScript writes otherwise than Python, and what Python writes.
_DIALECT: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\[\^\]"), r"[\\s\\S]"),
    (re.compile(r"\(\?<(?=[A-Za-z_$])"), "(?P<"),
    (re.compile(r"\\u\{0*([0-9A-Fa-f]{1,6})\}"), lambda m: f"\\U{m[1]:0>8}"),
    (re.compile(r"\\c([A-Za-z])"), lambda m: f"\\x{ord(m[1]) % 32:02x}"),
)

_REPEATS = (sre_parse.MAX_REPEAT, sre_parse.MIN_REPEAT, sre_parse.POSSESSIVE_REPEAT)
_COUNT = re.compile(r"\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}", re.ASCII)


def check_pattern(pattern: str) -> str | None:
    """The fault of a ``stop_regex``, or None. Python backtracks: repeats within repeats, and
    many of them in a row, can take longer than anybody waits."""
    try:
        parsed = sre_parse.parse(pattern)
        repeats = list(_repeats(parsed))
    except _UNREADABLE as error:
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
                kinds = [kind for kind, _ in _operations(part)]
                varies = bool(inner) or sre_parse.BRANCH in kinds
                found.append((varies and high > 1, int(high)))
        found += inner
    return found


def _operations(parsed: Any) -> Iterator[tuple[Any, Any]]:
    """All operations of a pattern and of the patterns within, each with its argument."""
    for kind, value in parsed:
        yield kind, value
        for part in _parts(value):
            yield from _operations(part)


def _parts(value: object) -> list[sre_parse.SubPattern]:
    if isinstance(value, sre_parse.SubPattern):
        return [value]
    if isinstance(value, (tuple, list)):
        return [part for item in value for part in _parts(item)]
    return []


def check_literal(name: str, value: object) -> str | None:
    """The fault of an empty value that SGLang takes as it is, or None.

    A template makes one of an empty column. Each line would have an answer, of one token or
    of as many as fit, and count as completed.
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
    with suppress(*_UNREADABLE):  # which is another fault
        return re.search(pattern, "") is not None
    return False


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
    counts = _counts(grammar)
    if any(count > MAX_GRAMMAR_REPEATS for count in counts):
        return f"it repeats {max(counts)} times; the most are {MAX_GRAMMAR_REPEATS}"
    return None


def _counts(grammar: str) -> list[int]:
    return [int(n[:12]) for pair in _COUNT.findall(grammar) for n in pair if n]


def check_schema(grammar: str) -> str | None:
    """The fault of a JSON schema, or of a structural tag with schemas, or None."""
    if problem := check_grammar(grammar):
        return problem
    try:
        schema = json.loads(grammar)
    except ValueError:
        return None  # the compiler names the fault
    if loop := _endless_reference(schema):
        return (
            f"{loop!r:.100} refers to itself and to nothing else, so no answer fits it"
        )
    named = [each.get("format") for each in objects_of(schema)]
    if formats := _BARE_FORMATS.intersection(f for f in named if isinstance(f, str)):
        return (
            f"the format {min(formats)!r} has quotes and control characters, so answers "
            "would be no valid JSON. Use a pattern that excludes them"
        )
    found = list(_patterns(schema))
    for pattern in found:
        try:
            parsed = sre_parse.parse(_as_python(pattern))
        except _UNREADABLE:
            # Of another dialect. The compiler reads it, and only long ones are refused.
            if max(_counts(pattern), default=0) > MAX_TEXT_REPEATS:
                return (
                    f"the pattern {pattern[:100]!r} cannot be read, and repeats more than "
                    f"{MAX_TEXT_REPEATS} times. Use minLength and maxLength instead"
                )
            continue
        if "[^]" in pattern or not _has_plain(parsed):
            return (
                f"the pattern {pattern[:100]!r} asks for quotes, backslashes or control "
                "characters, so answers would be no valid JSON. Exclude these characters"
            )
        repeats = list(_wide_repeats(parsed, 1))
        nested = max((most for most, is_nested in repeats if is_nested), default=0)
        counts = [most for most, _ in repeats]
        if (
            nested > MAX_NESTED_TEXT_REPEATS
            or max(counts, default=0) > MAX_TEXT_REPEATS
            or sum(counts) > MAX_ALL_TEXT_REPEATS
        ):
            return (
                f"the pattern {pattern[:100]!r} repeats more than {MAX_TEXT_REPEATS} "
                f"times, or in a repeat of a repeat {MAX_NESTED_TEXT_REPEATS} times, "
                "what may be a quote, a backslash or a control character, so answers "
                "would be no valid JSON, or take too long to prepare. Use minLength and "
                "maxLength instead, or exclude these characters"
            )
    return None


def _endless_reference(schema: Any) -> str | None:
    """A reference that leads back to itself before anything else is said, or None."""
    ended: set[int] = set()

    def follow(part: Any, way: list[int]) -> str | None:
        if not isinstance(part, dict) or id(part) in ended:
            return None
        if id(part) in way:
            return str(part.get("$ref", "allOf"))
        nexts = part["allOf"] if isinstance(part.get("allOf"), list) else []
        if isinstance(ref := part.get("$ref"), str):
            nexts = [*nexts, _at(schema, ref)]
        for each in nexts:
            if loop := follow(each, [*way, id(part)]):
                return loop
        ended.add(id(part))
        return None

    return next(filter(None, (follow(part, []) for part in objects_of(schema))), None)


def objects_of(part: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value, itself among them."""
    if isinstance(part, dict):
        yield part
    inner = part.values() if isinstance(part, dict) else part
    for each in inner if isinstance(part, dict | list) else ():
        yield from objects_of(each)


def _at(schema: Any, ref: str) -> Any:
    """The part of a schema at a JSON pointer, None if there is none."""
    start, *names = ref.split("/")
    if start != "#":
        return None
    for name in names:
        name = name.replace("~1", "/").replace("~0", "~")
        schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def _patterns(part: Any) -> Iterator[str]:
    """The patterns of all strings and names of properties in a schema."""
    for each in objects_of(part):
        if isinstance(each.get("pattern"), str):
            yield each["pattern"]
        if isinstance(each.get("patternProperties"), dict):
            yield from each["patternProperties"]


def _as_python(pattern: str) -> str:
    """A pattern of JavaScript's dialect, which schemas have, in Python's."""
    for of_javascript, of_python in _DIALECT:
        pattern = of_javascript.sub(of_python, pattern)
    return pattern


def _has_plain(parsed: Any) -> bool:
    """Whether a match can do without the characters that a JSON string has to escape.

    If none can, xgrammar takes the pattern for JSON text, and not for a pattern.
    """
    return all(_is_plain(kind, value) for kind, value in parsed)


def _is_plain(kind: Any, value: Any) -> bool:
    if kind is sre_parse.LITERAL:
        return value not in _ESCAPED
    if kind is sre_parse.IN:
        return any(_has_plain_member(*each) for each in value)
    if kind is sre_parse.BRANCH:
        return any(_has_plain(part) for part in value[1])
    if kind in _REPEATS and value[0] == 0:
        return True
    return all(_has_plain(part) for part in _parts(value))


def _has_plain_member(kind: Any, value: Any) -> bool:
    if kind is sre_parse.RANGE:
        low, high = value
        return any(each not in _ESCAPED for each in range(low, min(high, low + 64) + 1))
    return kind is not sre_parse.LITERAL or value not in _ESCAPED


def _wide_repeats(
    parsed: Any, times: int, is_whole: bool = False
) -> Iterator[tuple[int, bool]]:
    """How often each repeated part occurs that may be a character of ``_ESCAPED``, and
    whether it is the whole of what another repeat repeats.

    times: how often repeats around it repeat it.
    is_whole: whether it is the whole of the part of the innermost of these.
    """
    is_whole = is_whole and len(parsed) == 1
    for kind, value in parsed:
        if kind not in _REPEATS:
            for part in _parts(value):
                yield from _wide_repeats(part, times, is_whole)
            continue
        low, high, part = value
        most = int(low if high == sre_parse.MAXREPEAT else high) or 1
        most = min(times * most, 1 << 20)
        if _may_be_escaped(part) and most > 1:
            yield most, is_whole
        yield from _wide_repeats(part, most, True)


def _may_be_escaped(parsed: Any) -> bool:
    """Whether a part can match a character that a JSON string has to escape."""
    return any(
        kind in (sre_parse.ANY, sre_parse.NOT_LITERAL)
        or (kind is sre_parse.LITERAL and value in _ESCAPED)
        or (kind is sre_parse.IN and any(_is_wide(*each) for each in value))
        for kind, value in _operations(parsed)
    )


def _is_wide(kind: Any, value: Any) -> bool:
    """Whether a member of a set of characters is one of ``_ESCAPED``, or all but some."""
    if kind is sre_parse.RANGE:
        low, high = value
        return any(low <= each <= high for each in _ESCAPED)
    if kind is sre_parse.CATEGORY:
        return value not in (sre_parse.CATEGORY_DIGIT, sre_parse.CATEGORY_WORD)
    return kind is sre_parse.NEGATE or value in _ESCAPED
