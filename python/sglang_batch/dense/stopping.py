"""When a row's answer ends.

Where several reasons come with one token, a stop string wins over a regex, that over an
ending token, that over a stop rule, that over the length, and that over the end of the
grammar, as in SGLang. ``min_new_tokens`` is kept when tokens are chosen, and holds back no
stop string.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from ..batch_api.stop_rules import AnswerText, AnswerWatch, Cut, RegexTooComplex
from .row_request import Stopping

# Bytes of one character in UTF-8, each of which may be a token.
_MOST_TOKENS_OF_CHARACTER = 4
# Look-arounds need text outside the match, which the width of the match does not count.
_LOOK_AROUNDS = ("(?=", "(?!", "(?<=", "(?<!")


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer ended.

    reason: ``stop``, ``length`` or ``abort``.
    matched: for ``stop``, the token, stop string, regex or rule that ended it.
    error: for ``abort``, why.
    """

    reason: str
    matched: int | str | Cut | None = None
    error: str | None = None


def ending_ids(stopping: Stopping, eos_ids: Iterable[int]) -> frozenset[int]:
    """The tokens that end an answer: the request's, and the model's unless ignored."""
    return stopping.token_ids | (
        frozenset() if stopping.ignore_eos else frozenset(eos_ids)
    )


class RowStopping:
    """Decides after each token of one row whether it is the last.

    Only the last tokens, as many as the longest stop string has bytes and a few more, are made
    into text. A regex that can match text of any length needs all of them.

    Args:
        eos_ids: the ending tokens of the model.
        tokenizer: of transformers; not used where nothing reads text.

    Raises:
        ValueError: a regex is invalid.
    """

    def __init__(
        self,
        stopping: Stopping,
        *,
        eos_ids: Iterable[int],
        tokenizer: Any,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._stopping = stopping
        self._ending_ids = ending_ids(stopping, eos_ids)
        self._tokenizer = tokenizer
        self._regexes = [_compiled(regex) for regex in stopping.regexes]
        self._tail: deque[int] = deque(maxlen=_tail_len(stopping))
        self.num_tokens = 0
        self._watch: AnswerWatch | None = None
        if rules := stopping.rules:
            skips = stopping.skip_special_tokens
            text = None
            if rules.reads_text:
                text = AnswerText(tokenizer, prompt_ids, skip_special_tokens=skips)
            self._watch = AnswerWatch(rules, text, stopping.reasoning_end)

    def append(self, token: int, *, grammar_ended: bool = False) -> Ending | None:
        """Add a token to the answer. Returns why the answer ends with it, None if it continues.

        Args:
            grammar_ended: whether the row's grammar takes no token after this one.
        """
        self.num_tokens += 1
        self._tail.append(token)
        if (text := self._matched_text()) is not None:
            return Ending("stop", text)
        if token in self._ending_ids:
            return Ending("stop", token)
        if (ending := self._by_rule(token)) is not None:
            return ending
        if self.num_tokens >= self._stopping.max_new_tokens:
            return Ending("length")
        return Ending("stop", token) if grammar_ended else None

    def _by_rule(self, token: int) -> Ending | None:
        if self._watch is None:
            return None
        try:
            cut = self._watch.feed(token)
        except RegexTooComplex as error:
            return Ending("abort", error=f"stop_rules: {error}.")
        return None if cut is None else Ending("stop", cut)

    def _matched_text(self) -> str | None:
        if not self._stopping.strings and not self._regexes:
            return None
        text = self._tokenizer.decode(list(self._tail))
        for string in self._stopping.strings:
            if string in text:
                return string
        # `^` matches where the string begins, even if the search starts later. So a
        # search from 1 cannot take the beginning of the tail for that of the answer.
        start = 0 if len(self._tail) == self.num_tokens else 1
        for regex in self._regexes:
            if regex.search(text, start):
                return regex.pattern
        return None


def _compiled(regex: str) -> re.Pattern[str]:
    try:
        return re.compile(regex)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"{regex!r} is no regex that Python's re accepts: {error}"
        ) from error


def _tail_len(stopping: Stopping) -> int | None:
    """Tokens whose text has every match that ends in the last one, None for all.

    A token is at least one byte of text. The first character of the tail may be
    incomplete, and another one may tell whether a word begins.
    """
    most = max((len(string.encode()) for string in stopping.strings), default=0)
    for regex in stopping.regexes:
        width = _parser.parse(regex).getwidth()[1]
        if width >= _parser.MAXREPEAT or any(look in regex for look in _LOOK_AROUNDS):
            return None
        most = max(most, width * _MOST_TOKENS_OF_CHARACTER)
    return most + 2 * _MOST_TOKENS_OF_CHARACTER
