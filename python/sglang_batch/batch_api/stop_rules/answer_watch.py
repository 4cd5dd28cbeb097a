"""The stop rules of one answer, after each of its tokens: text, repetition, JSON, patterns."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .regex_rule import RegexRule
from .rule_settings import Repetition, StopRules

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
                self._read_reasoning(token)
            elif text and (cut := self._cut_text(text)) is not None:
                return cut
        return Cut("repetition") if loops else None

    def _read_reasoning(self, token: int) -> None:
        length = len(self._reasoning_end)
        self._last = (*self._last, token)[-length:]
        if self._last == self._reasoning_end:
            self._reasoning_end = ()

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
            text = self._stream.step(token)
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
        self._stream: _SlowStream | _FastStream = (
            _SlowStream(self._tokenizer, self._skip_special_tokens)
            if backend is None
            else _FastStream(backend, self._skip_special_tokens)
        )
        for token in before:
            self._stream.step(token)


class _FastStream:
    """A stream of the library that fast tokenizers are made of."""

    def __init__(self, backend: Any, skip_special: bool) -> None:
        from tokenizers.decoders import DecodeStream

        self._backend = backend
        self._stream: Any = DecodeStream(skip_special_tokens=skip_special)

    def step(self, token: int) -> str | None:
        found: str | None = self._stream.step(self._backend, token)
        return found


class _SlowStream:
    """The same for tokenizers that only decode whole lists."""

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
        # Numbers as text: one of a million digits takes minutes to become an int.
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
