"""All rules of one answer, after each of its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .answer_text import AnswerText
from .json_rule import JsonRule
from .regex_rule import RegexRule
from .repetition_rule import RepetitionRule
from .rule_settings import StopRules

# The keys of SGLang's finish reason that have the rule and the extra characters.
REASON_KEY = "stop_rule"
_EXTRA_KEY = "num_extra"


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of an answer by a rule, in its last token.

    rule: ``json``, ``regex`` or ``repetition``.
    num_extra: characters of the text so far that are behind the end.
    """

    rule: str
    num_extra: int = 0

    @property
    def matched(self) -> str:
        """What the answer's ``matched_stop`` says."""
        return f"stop_rules.{self.rule}"

    def to_reason(self) -> dict[str, str | int]:
        """SGLang's finish reason of the answer."""
        return {
            "type": "stop",
            "matched": self.matched,
            REASON_KEY: self.rule,
            _EXTRA_KEY: self.num_extra,
        }


def without_extra(text: str, reason: Mapping[str, object] | None) -> str | None:
    """The text of an answer up to where a rule ended it. None if none did.

    Args:
        reason: SGLang's finish reason.
    """
    if not reason or REASON_KEY not in reason:
        return None
    extra = reason[_EXTRA_KEY]
    assert isinstance(extra, int)
    return text[: len(text) - extra]


class AnswerWatch:
    """Decides after each token of an answer whether a rule ends it.

    Args:
        text: None where no rule reads text.
        reasoning_end: tokens that end the reasoning an answer begins with. Rules that read
            text begin behind it; a loop may be in it. None without reasoning.
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
        """Add a token to the answer.

        Returns:
            How the answer ends with this token, None if it continues.

        Raises:
            RegexTooComplex: this answer takes a pattern to its limits.
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
