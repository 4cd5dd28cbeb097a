"""The ``stop_rules`` of a request, which end an answer where the rest of it is useless."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Any

import msgspec
import numpy as np

from ..request import BatchRequestInput, Requests
from .protocol import GENERATING_URLS

FIELD = "stop_rules"
RULES = ("json", "regex", "repetition")
# Most patterns of a request. Each is matched against every byte of the answer.
MAX_REGEXES = 8
# Counts for each size of a pattern are kept while the answer grows.
MAX_PATTERN_SIZE = 512
_MOST = 1 << 20


@dataclass(frozen=True, slots=True)
class Repetition:
    """When the last tokens of an answer repeat a pattern: the end of a loop.

    A pattern comes ``min_count`` times in a row, with ``min_tokens`` tokens in all:
    a row of spaces or dashes is shorter. Raises ValueError if a number is out of
    range.
    """

    max_pattern_size: int = 64
    min_pattern_size: int = 1
    min_count: int = 4
    min_tokens: int = 64

    def __post_init__(self) -> None:
        least = {"min_count": 2}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            low, high = least.get(name, 1), _MOST
            if name.endswith("pattern_size"):
                high = MAX_PATTERN_SIZE
            if type(value) is not int or not low <= value <= high:
                raise ValueError(
                    f"repetition.{name} is {_short(value)}; give a whole number from "
                    f"{low} to {high}"
                )
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"repetition.min_pattern_size is {self.min_pattern_size}, more than "
                f"max_pattern_size {self.max_pattern_size}; give a smaller one"
            )


@dataclass(frozen=True, slots=True)
class StopRules:
    """Ends of an answer besides its stop strings, ending tokens and length.

    The first JSON value is complete, one of the regular expressions matches, or it
    loops.
    """

    json: bool = False
    regexes: tuple[str, ...] = ()
    repetition: Repetition | None = None

    def __bool__(self) -> bool:
        return self.json or self.reads_text or self.repetition is not None

    @property
    def reads_text(self) -> bool:
        """Whether a rule needs the text of tokens, so a tokenizer."""
        return self.json or bool(self.regexes)

    @classmethod
    def parse(cls, value: object) -> StopRules:
        """The rules of JSON such as ``{"json": true}``. ValueError: one sentence."""
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{_short(value)} is not an object of rules; the rules are "
                f"{', '.join(RULES)}"
            )
        for name in value:
            if name not in RULES:
                raise ValueError(
                    f"there is no rule {_short(name)}; the rules are {', '.join(RULES)}"
                )
        return cls(
            json=_parse_json(value.get("json")),
            regexes=_parse_regexes(value.get("regex")),
            repetition=_parse_repetition(value.get("repetition")),
        )

    @classmethod
    def from_text(cls, text: str) -> StopRules:
        """The rules of JSON text. Raises as :meth:`parse`."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{_short(text)} is not JSON ({error})") from None
        return cls.parse(value)

    def to_text(self) -> str:
        loops = self.repetition and dataclasses.asdict(self.repetition)
        rules = {"json": self.json, "regex": self.regexes, "repetition": loops}
        return json.dumps({name: rule for name, rule in rules.items() if rule})


NO_RULES = StopRules()


def _parse_json(value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"json is {_short(value)}; give true or false")
    return bool(value)


def _parse_regexes(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    regexes = value if isinstance(value, list) else [value]
    if len(regexes) > MAX_REGEXES:
        raise ValueError(
            f"regex has {len(regexes)} patterns; give at most {MAX_REGEXES}"
        )
    for regex in regexes:
        if not isinstance(regex, str):
            raise ValueError(f"regex is {_short(regex)}; give a pattern or a list")
        if (fault := check_regex(regex)) is not None:
            raise ValueError(f"regex {_short(regex)} {fault}")
    return tuple(regexes)


def _parse_repetition(value: object) -> Repetition | None:
    if value is None or value is False:
        return None
    if value is True:
        return Repetition()
    known = [field.name for field in fields(Repetition)]
    if not isinstance(value, Mapping):
        raise ValueError(
            f"repetition is {_short(value)}; give true, or an object of "
            f"{', '.join(known)}"
        )
    for name in value:
        if name not in known:
            raise ValueError(
                f"repetition has no setting {_short(name)}; the settings are "
                f"{', '.join(known)}"
            )
    return Repetition(**value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def with_stop_rules(requests: Requests, rules: str | None) -> Requests:
    """The requests that generate, with these ``stop_rules`` in bodies without any."""
    return requests if rules is None else _WithStopRules(requests, rules.encode())


class _WithStopRules:
    def __init__(self, requests: Requests, rules: bytes) -> None:
        self._requests = requests
        self._first_field = b'{"%s": %s, ' % (FIELD.encode(), rules)

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: int) -> BatchRequestInput:
        request = self._requests[index]
        if request.url not in GENERATING_URLS or not _lacks_rules(request.body):
            return request
        rest = request.body.lstrip()[1:]
        return dataclasses.replace(request, body=self._first_field + rest)


def _lacks_rules(body: bytes) -> bool:
    """Whether a body is an object without rules. A line with a bad body keeps it as it is."""
    try:
        found = _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return bool(found) and FIELD not in found


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
    """Whether the text so far matches a pattern that :func:`check_regex` accepts.

    The patterns are those of Rust's ``regex`` crate, matched by llguidance, one of SGLang's
    grammar engines: by derivatives, in time linear in the text, whatever the pattern. So none
    can keep a scheduler busy, and the cost of a pattern is counted in steps, not seconds: all
    ranks of a model decide alike.
    """

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
            # Read the answer anew with own states: others may have used up the shared ones.
            _compiled.cache_clear()  # rare, so others may be compiled again
            self._matcher, self._is_shared = _compile(self.pattern), False
            self._end(b"".join(self._text[:-1]))
            end = self._end(data)
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

    tokenizer, limits = _bytes_and_limits()
    grammar = LLMatcher.grammar_from_regex(regex)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(_reason(matcher.get_error()))
    return matcher


@lru_cache(maxsize=1)
def _bytes_and_limits() -> tuple[Any, Any]:
    """A tokenizer whose tokens are bytes, and the limits of all patterns."""
    from llguidance import LLParserLimits, LLTokenizer

    return LLTokenizer("byte"), LLParserLimits(
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


# The keys of SGLang's finish reason that have the rule and the extra characters.
REASON_KEY = "stop_rule"
_EXTRA_KEY = "num_extra"


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of an answer by a rule, with the number of characters that are behind it."""

    rule: str
    num_extra: int = 0

    @property
    def matched(self) -> str:
        return f"stop_rules.{self.rule}"

    def to_reason(self) -> dict[str, str | int]:
        return {
            "type": "stop",
            "matched": self.matched,
            REASON_KEY: self.rule,
            _EXTRA_KEY: self.num_extra,
        }


def without_extra(text: str, reason: Mapping[str, object] | None) -> str | None:
    """The text up to where a rule ended it, by SGLang's finish reason, or None."""
    if not reason or REASON_KEY not in reason:
        return None
    extra = reason[_EXTRA_KEY]
    assert isinstance(extra, int)
    return text[: len(text) - extra]


class AnswerWatch:
    """Decides after each token of an answer whether a rule ends it.

    No rule may read text, which is None then. Rules that do begin behind the tokens
    of ``reasoning_end``; a loop may be in the reasoning.
    """

    def __init__(
        self,
        rules: StopRules,
        text: AnswerText | None,
        reasoning_end: Sequence[int] | None = None,
    ) -> None:
        self._text = text
        self._regexes = [RegexRule(pattern) for pattern in rules.regexes]
        self._json = JsonRule() if rules.json else None
        repetition = rules.repetition
        self._repetition = None if repetition is None else RepetitionRule(repetition)
        self._reasoning_end = tuple(reasoning_end or ())
        self._last: tuple[int, ...] = ()

    def feed(self, token: int) -> Cut | None:
        """Add a token.

        Returns how the answer ends with it, if it does. Raises RegexTooComplex
        if the answer takes a pattern to its limits.
        """
        loops = self._repetition is not None and self._repetition.feed(token)
        if self._text is not None:
            text = self._text.feed(token)
            if self._reasoning_end:
                self._last = (*self._last, token)[-len(self._reasoning_end) :]
                if self._last == self._reasoning_end:
                    self._reasoning_end = ()
            elif text and (cut := self._cut_text(text)) is not None:
                return cut
        return Cut("repetition") if loops else None

    def _cut_text(self, text: str) -> Cut | None:
        ends = [
            (end, "regex")
            for regex in self._regexes
            if (end := regex.feed(text)) is not None
        ]
        if self._json is not None and (end := self._json.feed(text)) is not None:
            ends.append((end, "json"))
        if not ends:
            return None
        end, rule = min(ends)
        return Cut(rule, len(text) - end)


# Tokens before the answer on which the text of its first one may depend. As many as SGLang's
# detokenizer reads.
NUM_BEFORE = 5
# Tokens without text after which a character is given up. One of UTF-8 has 4 bytes.
_MAX_PENDING = 8


class AnswerText:
    """The text that each token of an answer adds, as a detokenizer of transformers shows it.

    A character of several tokens comes with its last one. Of bytes that are no
    character nothing comes. The prompt's last tokens are enough.
    """

    def __init__(
        self, tokenizer: Any, prompt_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        try:
            self._open(prompt_ids[-NUM_BEFORE:])
        except Exception:  # a prompt with images has ids of no token
            self._open(())

    def feed(self, token: int) -> str:
        """The text that a token completes, empty if it completes none."""
        try:
            text = self._step(token)
        except Exception:
            # The library raises for an id that it does not have, and where the text of some
            # tokens is not the beginning of that of more.
            self._open(())
            return ""
        if text:
            self._num_pending = 0
            return text
        self._num_pending += 1
        if self._num_pending > _MAX_PENDING:
            # Otherwise each further token would have all of them decoded again.
            self._open(())
        return ""

    def _open(self, before: Sequence[int]) -> None:
        self._num_pending = 0
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self._step: Callable[[int], str | None]
        if backend is None:
            stream = _SlowStream(self._tokenizer, self._skip_special_tokens)
            self._step = stream.step
        else:
            from tokenizers.decoders import DecodeStream

            fast: Any = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            self._step = partial(fast.step, backend)
        for token in before:
            self._step(token)


class _SlowStream:
    """``DecodeStream`` of fast tokenizers for those that only decode whole lists."""

    def __init__(self, tokenizer: Any, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._num_read = 0

    def step(self, token: int) -> str | None:
        self._ids.append(token)
        read = self._decode(self._ids[: self._num_read])
        text = self._decode(self._ids)
        if len(text) <= len(read) or text.endswith("\ufffd"):
            return None
        del self._ids[: max(0, self._num_read - NUM_BEFORE)]
        self._num_read = len(self._ids)
        return text[len(read) :]

    def _decode(self, ids: list[int]) -> str:
        found: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
        return found


# Tokens that fit into the array before it is moved.
_ROOM = 1024


class RepetitionRule:
    """Knows, for each size of a pattern, the last token that differed from the one a pattern
    before.

    The last ``min_count`` patterns of a size are equal if as many tokens as all but the first
    of them are. Until the first size can have as many, no token needs a look at all sizes.
    """

    def __init__(self, settings: Repetition) -> None:
        sizes = np.arange(settings.min_pattern_size, settings.max_pattern_size + 1)
        count = np.maximum(settings.min_count, -(-settings.min_tokens // sizes))
        self._needed = sizes * (count - 1)
        self._differed = np.zeros(len(sizes), np.int64)
        self._num_tokens = self._soonest = 0
        self._first = settings.min_pattern_size - 1
        self._last = settings.max_pattern_size
        # The newest token is first, so the one a pattern before is at the pattern's size.
        self._tokens = np.full(self._last + _ROOM, -1, np.int64)
        self._front = _ROOM

    def feed(self, token: int) -> bool:
        """Add a token to the answer. Returns whether it loops."""
        self._num_tokens = number = self._num_tokens + 1
        front = self._front
        before = self._tokens[front + self._first : front + self._last]
        np.copyto(self._differed, number, where=before != token)
        if not front:
            self._tokens[_ROOM:] = self._tokens[: self._last]
            front = _ROOM
        self._front = front = front - 1
        self._tokens[front] = token
        if number < self._soonest:
            return False
        self._soonest = int((self._differed + self._needed).min())
        return number >= self._soonest


_FENCE = re.compile(r"```\w{0,16}[ \t]*\r?\n\s*")
# What may become a fence.
_FENCE_BEGUN = re.compile(r"`{1,3}|```\w{1,16}[ \t]*\r?|```[ \t]*\r?")
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
# A number or a word ends before any other character.
_AFTER_SCALAR = re.compile(r"[^-+.0-9A-Za-z]")
_SPACE = " \t\r\n"


class JsonRule:
    """Reads the value an answer begins with, after white space or the line of a code fence.

    An answer that begins otherwise, or whose value turns out not to be JSON, is not cut. A number
    or a word is complete with the first character behind it.
    """

    def __init__(self) -> None:
        self._head = ""
        self._value: list[str] | None = None
        self._depth = 0
        self._in_string = self._is_escaped = self._is_scalar = False
        self._is_over = False

    def feed(self, text: str) -> int | None:
        """Add text. Returns where in it the value ends, in characters, or None."""
        if self._is_over:
            return None
        start = 0
        if self._value is None:
            rest = self._begin(text)
            if not rest:
                return None
            start = len(text) - len(rest)
        assert self._value is not None
        end = self._end(text, start)
        self._value.append(text[start:end])
        if end is None:
            return None
        self._is_over = True
        return end if _is_json("".join(self._value)) else None

    def _begin(self, text: str) -> str:
        """The part of ``text`` from the value's first character on, empty if there is none."""
        head = (self._head + text).lstrip(_SPACE)
        if head.startswith("`"):
            fence = _FENCE.match(head)
            if fence is None or fence.end() == len(head):
                self._head = head
                self._is_over = fence is None and not _FENCE_BEGUN.fullmatch(head)
                return ""
            head = head[fence.end() :]
        if not head:
            return ""
        self._value = []
        self._is_scalar = head[0] not in '"{['
        self._is_over = self._is_scalar and head[0] not in "-0123456789tfn"
        return "" if self._is_over else head

    def _end(self, text: str, start: int) -> int | None:
        if self._is_scalar:
            found = _AFTER_SCALAR.search(text, start)
            return None if found is None else found.start()
        place = start
        while place < len(text):
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, place)
            if found is None:
                return None
            place = found.end()
            mark = found[0]
            if mark == "\\":
                self._is_escaped = True
            elif mark == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if mark in "{[" else -1
            if self._depth <= 0 and not self._in_string:
                return place
        return None


def _is_json(text: str) -> bool:
    try:
        # Numbers as text: one of a million digits takes minutes to become an int. NaN and
        # Infinity are no JSON, and int() refuses them.
        json.loads(text, parse_int=str, parse_float=str, parse_constant=int)
    except (ValueError, RecursionError):
        return False
    return True
