"""Stop rules: what they end, where, and which are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_batch.batch_api.stop_rules import (
    AnswerText,
    AnswerWatch,
    Cut,
    JsonRule,
    RegexRule,
    RegexTooComplex,
    Repetition,
    RepetitionRule,
    StopRules,
    without_extra,
)

# Pieces of text, as tokens are.
pieces_of = st.integers(1, 7)


def pieces(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def kept(feed: Callable[[str], int | None], text: str, size: int) -> str | None:
    """The answer up to the end that a rule finds, None if it finds none."""
    before = ""
    for piece in pieces(text, size):
        if (end := feed(piece)) is not None:
            return before + piece[:end]
        before += piece
    return None


# JSON ---------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)  # fmt: skip


@given(
    value=values, escape=st.booleans(), indent=st.sampled_from([None, 1]),
    head=st.sampled_from(["", " \n", "```json\n", "\n```\n\n", "``` JSON\r\n"[:3] + "\n"]),
    tail=st.sampled_from(["\n", " and more", "\n```\nDone."]), size=pieces_of,
)  # fmt: skip
def test_the_first_value_is_kept_whole_and_nothing_behind_it(
    value: Any, escape: bool, indent: int | None, head: str, tail: str, size: int
) -> None:
    text = json.dumps(value, ensure_ascii=escape, indent=indent)
    assert kept(JsonRule().feed, head + text + tail, size) == head + text
    if isinstance(value, (dict, list, str)):
        assert kept(JsonRule().feed, head + text, size) == head + text
        assert kept(JsonRule().feed, head + text[:-1], size) is None


@pytest.mark.parametrize(
    "text",
    [
        *('Here: {"a": 1} ', "{a: 1} ", "{]} ", "NaN ", "tru ", "```python3", "`x` 1 "),
        *("{'a': 1} ", '{"a": NaN} ', "```json 1\n", "`" * 9, '"a\nb" '),
        "[" * 100_000 + "]" * 100_000,
    ],
)
def test_what_is_no_json_is_not_cut(text: str) -> None:
    assert kept(JsonRule().feed, text + "[1] ", 3) is None


@given(st.text('[]{}",:\\`n1t \n'), pieces_of)
def test_only_json_is_kept(text: str, size: int) -> None:
    found = kept(JsonRule().feed, text, size)
    if found is not None:
        json.loads(re.sub(r"\A\s*```\w*[ \t]*\r?\n", "", found))
        assert text.startswith(found)


def test_a_number_of_a_million_digits_takes_no_time() -> None:
    number = "7" * 1_000_000
    assert kept(JsonRule().feed, number + " ", 1000) == number


# Regular expressions ------------------------------------------------------------------

PATTERNS = [
    *(r"Answer: \d+\n", r"(a|b)*c{2,3}", r"\n\n", r"[^a-z ]x", r"(?i)STOP|end"),
    *(r"^ab+c", r"^(no|yes)\b"[:-2], r"é中?!", r"(?s:a.b)", r"x{0,3}yz"),
]


@settings(deadline=None)  # the first pattern imports its engine
@given(
    st.sampled_from(PATTERNS), pieces_of,
    st.text("abcxyz stopEND\n1é中!", max_size=60)
    | st.sampled_from(["Answer: 42\n!", "yes", "abbbc.", " no", "accé中!"]),
)  # fmt: skip
def test_an_answer_ends_with_the_piece_in_which_python_finds_a_match(
    pattern: str, size: int, text: str
) -> None:
    found = kept(RegexRule(pattern).feed, text, size)
    so_far = ""
    for piece in pieces(text, size):
        so_far += piece
        if re.search(pattern, so_far):
            assert found is not None
            assert so_far.startswith(found)
            assert len(so_far) - len(found) < size
            assert re.search(f"(?:{pattern})\\Z", found)
            return
    assert found is None


def test_a_match_is_as_long_as_its_piece_allows() -> None:
    assert kept(RegexRule(r"= \d+").feed, "x = 42.", 7) == "x = 42"
    assert kept(RegexRule(r"= \d+").feed, "x = 42.", 5) == "x = 4"


def test_no_pattern_is_slow() -> None:
    """Python needs longer than anybody waits for these."""
    for pattern in (r"(x+x+)+y", r"(a|a)*b", r"(.*)*Z", r"(a?){50}a{50}!"):
        assert kept(RegexRule(pattern).feed, "xa" * 5_000, 10) is None


def test_a_pattern_at_its_limits_fails_the_same_answers_whatever_came_before() -> None:
    def fails(text: str) -> bool:
        try:
            return kept(RegexRule(".{600}y").feed, text, 50) is None and False
        except RegexTooComplex as error:
            assert "fewer repeats" in str(error)
            return True

    assert [fails("x" * 300), fails("x" * 2_000)] == [False, True]
    assert [fails("x" * 300), fails("x" * 2_000)] == [False, True]


# Loops --------------------------------------------------------------------------------


def loops_at(settings: Repetition, tokens: list[int]) -> int | None:
    rule = RepetitionRule(settings)
    return next((n for n, token in enumerate(tokens, 1) if rule.feed(token)), None)


def first_loop(settings: Repetition, tokens: list[int]) -> int | None:
    """The same by comparing lists."""
    for end in range(1, len(tokens) + 1):
        for size in range(settings.min_pattern_size, settings.max_pattern_size + 1):
            count = max(settings.min_count, -(-settings.min_tokens // size))
            pattern = tokens[end - size : end]
            if (
                end >= size * count
                and tokens[end - size * count : end] == pattern * count
            ):
                return end
    return None


@given(
    st.builds(
        Repetition, max_pattern_size=st.integers(3, 6), min_pattern_size=st.integers(1, 3),
        min_count=st.integers(2, 4), min_tokens=st.integers(1, 12),
    ),
    st.lists(st.integers(0, 2), max_size=60)
    | st.lists(st.integers(0, 5), min_size=1, max_size=6).map(lambda part: part * 12),
)  # fmt: skip
def test_a_loop_is_found_with_its_last_token(
    settings: Repetition, tokens: list[int]
) -> None:
    assert loops_at(settings, tokens) == first_loop(settings, tokens)


def test_a_long_answer_may_begin_to_loop_anywhere() -> None:
    for start in (1_000, 1_023, 1_024, 1_100, 5_000):
        tokens = [*range(start), *([7, 8, 9] * 40)]
        assert loops_at(Repetition(), tokens) == start + 66  # 22 times 3 tokens


# Text of tokens -----------------------------------------------------------------------


class Bytes:
    """A tokenizer whose tokens are bytes, and 256 is special."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        if max(ids, default=0) > 256:
            raise OverflowError
        special = [] if skip_special_tokens else [b"<end>"]
        parts = [bytes([i]) if i < 256 else b"".join(special) for i in ids]
        return b"".join(parts).decode(errors="replace")


@given(st.text(max_size=40), st.binary(max_size=4))
def test_text_comes_with_its_last_byte(text: str, garbage: bytes) -> None:
    answer = AnswerText(Bytes(), [65, 66], skip_special_tokens=True)
    found = "".join(answer.feed(token) for token in [*text.encode(), 256])
    assert found == text.removesuffix("\ufffd")[: len(found)]
    assert len(text) - len(found) <= len(text) - len(text.rstrip("\ufffd"))
    for token in [*garbage, *[0x80] * 50, 999]:
        answer.feed(token)
    assert "".join(answer.feed(token) for token in b"on and on").endswith("on and on")


def test_prompts_may_have_ids_of_no_token() -> None:
    answer = AnswerText(Bytes(), [-1, 5_000], skip_special_tokens=False)
    assert [answer.feed(token) for token in (72, 256)] == ["H", "<end>"]


# All together -------------------------------------------------------------------------


def watch(rules: dict[str, Any], reasoning_end: list[int] | None = None) -> AnswerWatch:
    text = AnswerText(Bytes(), [], skip_special_tokens=True)
    return AnswerWatch(StopRules.parse(rules), text, reasoning_end)


def cuts(watched: AnswerWatch, text: str) -> Iterator[tuple[int, Cut]]:
    for number, token in enumerate(text.encode()):
        if (cut := watched.feed(token)) is not None:
            yield number, cut


def test_the_first_rule_ends_the_answer() -> None:
    rules = {"json": True, "regex": ["0 ", "none"], "repetition": {"min_tokens": 8}}
    assert next(cuts(watch(rules), "[1] 0 ")) == (2, Cut("json"))
    assert next(cuts(watch(rules), "10 1")) == (2, Cut("json", 1))
    assert next(cuts(watch(rules), "one 0 ")) == (5, Cut("regex"))
    assert next(cuts(watch(rules), "x[----------")) == (9, Cut("repetition"))
    assert list(cuts(watch(rules), "a plain answer")) == []


def test_text_is_read_behind_the_reasoning_and_loops_are_found_in_it() -> None:
    rules = {"json": True, "repetition": True}
    end = list(b"</t>")
    number, cut = next(cuts(watch(rules, end), '[1] </t>\n{"a": 1}'))
    assert (number, cut) == (16, Cut("json"))
    assert next(cuts(watch(rules, end), "so " * 99)) == (65, Cut("repetition"))


def test_the_reason_tells_the_rule_and_the_text_ends_where_it_says() -> None:
    reason = Cut("json", 2).to_reason()
    assert reason["type"] == "stop"
    assert reason["matched"] == "stop_rules.json"
    assert without_extra("[1]\n\n", reason) == "[1]"
    assert without_extra("[1]", Cut("regex").to_reason()) == "[1]"
    assert without_extra("text", {"type": "stop", "matched": "stop_rules.json"}) is None
    assert without_extra("text", None) is None


# As given -----------------------------------------------------------------------------


def test_rules_survive_their_text() -> None:
    rules = StopRules.parse(
        {"json": True, "regex": "a+", "repetition": {"min_count": 9}}
    )
    assert rules == StopRules.from_text(rules.to_text())
    assert rules.regexes == ("a+",)
    assert rules.repetition == Repetition(min_count=9)
    assert not StopRules.parse({"json": False, "regex": None, "repetition": False})
    assert not StopRules.parse(None)
    assert StopRules.parse({"repetition": {}}) == StopRules.parse({"repetition": True})


BAD = {
    "1 is not an object of rules; the rules are json, regex, repetition": 1,
    "there is no rule 'loop'; the rules are": {"loop": {}},
    "json is 'yes'; give true or false": {"json": "yes"},
    "regex is 5; give a pattern or a list": {"regex": [5]},
    "regex has 9 patterns; give at most 8": {"regex": ["a"] * 9},
    "regex '(' is not a regular expression (unclosed group)": {"regex": "("},
    "regex 'a)(b' is not a regular expression": {"regex": "a)(b"},
    "regex 'a*' matches an empty answer": {"regex": "a*"},
    "regex '$' matches an empty answer": {"regex": "$"},
    "regex '^' matches an empty answer": {"regex": "^"},
    "has an anchor, word boundary or look-around": {"regex": r"\bend\b"},
    "is not a regular expression (look-around": {"regex": "(?=x)y"},
    "is not a regular expression (backreferences": {"regex": r"(a)\1"},
    "put the others into its group": {"regex": "^a|b"},
    "has 257 characters; the most are 256": {"regex": "a" * 257},
    "has half of a surrogate pair": {"regex": "\udc80"},
    "repetition is 3; give true, or an object of": {"repetition": 3},
    "repetition has no setting 'count'": {"repetition": {"count": 3}},
    "repetition.min_count is 1; give a whole number from 2": {
        "repetition": {"min_count": 1}
    },
    "repetition.max_pattern_size is 513; give a whole number from 1 to 512": {
        "repetition": {"max_pattern_size": 513}
    },
    "repetition.min_pattern_size is 65, more than max_pattern_size 64": {
        "repetition": {"min_pattern_size": 65}
    },
}


@pytest.mark.parametrize("said", BAD)
def test_bad_rules_are_refused_in_one_sentence(said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        StopRules.parse(BAD[said])
    assert len(str(caught.value)) < 260
    assert "\n" not in str(caught.value)


def test_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="is not JSON"):
        StopRules.from_text("{")
