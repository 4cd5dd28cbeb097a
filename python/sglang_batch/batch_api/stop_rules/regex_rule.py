"""Ends an answer that matches a regular expression.

The patterns are those of Rust's ``regex`` crate, matched by llguidance, one of SGLang's
grammar engines: by derivatives, in time linear in the text, whatever the pattern. So none can
keep a scheduler busy, and the cost of a pattern is counted in steps, not seconds: all ranks
of a model decide alike.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

# Longest pattern, in characters. One of 256 takes at most some 30 ms to compile.
MAX_REGEX_LEN = 256
# Patterns that are kept compiled.
_KEPT = 256
# llguidance's units of work for a pattern as a whole and for a byte, and states of a pattern,
# at about 1 kB. Common patterns need a thousandth of it.
_COMPILE_FUEL = 200_000
_BYTE_FUEL = 20_000
_MAX_STATES = 10_000
_TOO_COMPLEX = "has too many ways to match for a check after each token; give one with fewer repeats"


class RegexTooComplex(ValueError):
    """A pattern that would need more states or steps than allowed."""


def check_regex(pattern: str) -> str | None:
    """What is wrong with a pattern, as the end of a sentence that names it, or None."""
    if len(pattern) > MAX_REGEX_LEN:
        return f"has {len(pattern)} characters; the most are {MAX_REGEX_LEN}"
    try:
        matcher = _compiled(pattern)
    except UnicodeEncodeError:
        return "has half of a surrogate pair, which is no character"
    except ValueError as error:
        return str(error)
    if matcher.is_accepting():
        return "matches an empty answer; give one that needs at least one character"
    return None


class RegexRule:
    """Whether the text so far matches a pattern that :func:`check_regex` accepts."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._matcher: Any = _compiled(pattern).deep_copy()
        self._is_shared = True
        self._text: list[bytes] = []
        self._is_over = False

    def feed(self, text: str) -> int | None:
        """Add text to the answer.

        A match is complete as soon as it can be, and is as long as this text
        allows. Returns where in it the answer ends, in characters, or None.
        Raises RegexTooComplex if this answer takes the pattern to its limits.
        """
        if self._is_over:
            return None
        data = text.encode("utf-8", "replace")
        self._text.append(data)
        try:
            end = self._end(data)
        except RegexTooComplex:
            if not self._is_shared:
                raise
            end = self._again()
        return None if end is None else len(data[:end].decode("utf-8", "ignore"))

    def _end(self, data: bytes) -> int | None:
        consume = self._matcher.try_consume_tokens
        accepts = self._matcher.is_accepting
        end = None
        for number, byte in enumerate(data, 1):
            if not consume((byte,)):
                if self._matcher.is_error():
                    raise RegexTooComplex(f"regex {self.pattern!r} {_TOO_COMPLEX}")
                self._is_over = True  # it had to match from the beginning
                return end
            if accepts():
                end = number
            elif end is not None:
                return end
        return end

    def _again(self) -> int | None:
        """Read the answer anew with own states: others may have used up the shared ones."""
        _compiled.cache_clear()  # rare, so others may be compiled again
        self._matcher, self._is_shared = _compile(self.pattern), False
        *before, last = self._text
        self._end(b"".join(before))
        return self._end(last)


def _compile(pattern: str) -> Any:
    """A matcher of answers that end with a match. ValueError: the end of a sentence."""
    anchored = pattern.startswith("^")
    if anchored and _has_top_alternative(pattern):
        raise ValueError(
            "begins with ^ for its first alternative only; put the others into its group, "
            "as in ^(a|b)"
        )
    inner = pattern[1:] if anchored else pattern
    _matcher(inner)  # alone, so that it cannot close our group
    return _matcher(f"(?:{inner})" if anchored else f"(?s:.*)(?:{inner})")


# Matchers to be copied.
_compiled = lru_cache(maxsize=_KEPT)(_compile)


def _matcher(regex: str) -> Any:
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_regex(regex)
    matcher = LLMatcher(_bytes_as_tokens(), grammar, log_level=0, limits=_limits())
    if matcher.is_error():
        raise ValueError(_reason(matcher.get_error()))
    return matcher


@lru_cache(maxsize=1)
def _bytes_as_tokens() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


@lru_cache(maxsize=1)
def _limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=_COMPILE_FUEL,
        step_lexer_fuel=_BYTE_FUEL,
        max_lexer_states=_MAX_STATES,
        verbose_errors=False,
    )


def _reason(error: str) -> str:
    """llguidance's reason as the end of a sentence."""
    if "lookarounds not supported" in error:
        return (
            "has an anchor, word boundary or look-around; only ^ at the beginning is "
            "supported"
        )
    # The parser of Rust says where, and then what.
    _, _, reason = error.partition("error: ")
    reason = (reason or error).splitlines()[0].strip()
    if "regular expression" not in reason and "invalid regex" not in error:
        return _TOO_COMPLEX
    return f"is not a regular expression ({reason})"


def _has_top_alternative(pattern: str) -> bool:
    """Whether there is a ``|`` outside of groups and classes."""
    depth, in_class, escaped = 0, False, False
    for character in pattern:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            return True
    return False
