"""Ends of answers, with tokenizers of single bytes and of longer tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sglang_batch.batch_api.stop_rules import Cut, Repetition, StopRules
from sglang_batch.dense.row_request import Stopping
from sglang_batch.dense.stopping import Ending, RowStopping, ending_ids
from sglang_batch.run.demo_model import SPECIAL_IDS, write_demo_model

EOS = SPECIAL_IDS["<|end|>"]
MANY = 10_000


@pytest.fixture(scope="module")
def byte_tokens(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("demo")
    write_demo_model(folder)
    return AutoTokenizer.from_pretrained(folder)


PIECES = ["a", "b", "ab", "aST", "OPb", "STOP", "Ã", "©", "x©", " a", " ", "TO", "P"]
"""Byte-level symbols; the two bytes of "é" are the pieces "Ã" and "©"."""


@pytest.fixture(scope="module")
def piece_tokens() -> Any:
    vocab = {piece: token for token, piece in enumerate(PIECES)}
    vocab = {piece.replace(" ", "Ġ"): token for piece, token in vocab.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def run(
    tokens: Sequence[int], stopping: Stopping, tokenizer: Any
) -> tuple[int, Ending] | None:
    """Tokens of the answer, and why it ended, if it did."""
    row = RowStopping(stopping, eos_ids=[EOS], tokenizer=tokenizer)
    for count, token in enumerate(tokens, start=1):
        if ending := row.append(token):
            return count, ending
    return None


def run_text(
    text: str, stopping: Stopping, tokenizer: Any
) -> tuple[int, Ending] | None:
    return run(list(text.encode()), stopping, tokenizer)


def test_an_answer_ends_with_a_token_of_the_model_or_of_the_request() -> None:
    assert run([1, EOS, 2], Stopping(MANY), None) == (2, Ending("stop", EOS))
    own = Stopping(MANY, token_ids=frozenset({7}))
    assert run([1, 7, EOS], own, None) == (2, Ending("stop", 7))


def test_only_the_models_tokens_are_ignored() -> None:
    ignoring = Stopping(5, ignore_eos=True, token_ids=frozenset({7}))
    assert run([1, EOS, 7], ignoring, None) == (3, Ending("stop", 7))
    assert run([EOS] * 9, ignoring, None) == (5, Ending("length"))
    assert ending_ids(ignoring, [EOS]) == {7}
    assert ending_ids(Stopping(5), [EOS, 3]) == {EOS, 3}


def test_an_answer_ends_at_its_length() -> None:
    assert run([1] * 9, Stopping(4), None) == (4, Ending("length"))
    assert run([1], Stopping(1), None) == (1, Ending("length"))


def test_a_stop_string_wins_over_token_and_length(byte_tokens: Any) -> None:
    at_once = Stopping(2, strings=("ab",), regexes=("b",), token_ids=frozenset(b"b"))
    assert run_text("ab", at_once, byte_tokens) == (2, Ending("stop", "ab"))
    regex = Stopping(2, regexes=("b",), token_ids=frozenset(b"b"))
    assert run_text("ab", regex, byte_tokens) == (2, Ending("stop", "b"))
    token = Stopping(2, token_ids=frozenset(b"b"))
    assert run_text("ab", token, byte_tokens) == (2, Ending("stop", ord("b")))


def test_the_end_of_the_grammar_is_the_last_reason() -> None:
    row = RowStopping(Stopping(3), eos_ids=[], tokenizer=None)
    assert row.append(1) is None
    assert row.append(2, grammar_ended=True) == Ending("stop", 2)
    assert row.append(3, grammar_ended=True) == Ending("length")


def test_the_first_string_of_the_request_is_the_one_that_matched(
    byte_tokens: Any,
) -> None:
    both = Stopping(MANY, strings=("yz", "xyz"))
    assert run_text("xyz", both, byte_tokens) == (3, Ending("stop", "yz"))


def test_min_new_tokens_holds_back_no_stop_string(byte_tokens: Any) -> None:
    stopping = Stopping(MANY, min_new_tokens=9, strings=("b",))
    assert run_text("ab", stopping, byte_tokens) == (2, Ending("stop", "b"))


def test_a_stop_string_may_be_a_special_token(byte_tokens: Any) -> None:
    stopping = Stopping(MANY, ignore_eos=True, strings=("<|end|>",))
    assert run([1, EOS], stopping, byte_tokens) == (2, Ending("stop", "<|end|>"))


def test_a_stop_string_may_begin_and_end_within_tokens(piece_tokens: Any) -> None:
    tokens = [PIECES.index(piece) for piece in ("a", "aST", "OPb", "a")]
    stopping = Stopping(MANY, strings=("STOP",))
    assert run(tokens, stopping, piece_tokens) == (3, Ending("stop", "STOP"))


def test_a_character_in_several_tokens_counts_once_it_is_whole(
    byte_tokens: Any,
) -> None:
    stopping = Stopping(MANY, strings=("é€",))
    assert run_text("xé€x", stopping, byte_tokens) == (6, Ending("stop", "é€"))
    regex = Stopping(MANY, regexes=("[é€]{2}",))
    assert run_text("xé€x", regex, byte_tokens) == (6, Ending("stop", "[é€]{2}"))


def test_a_caret_is_only_the_beginning_of_the_answer(byte_tokens: Any) -> None:
    stopping = Stopping(MANY, regexes=("^b",))
    assert run_text("a" * 40 + "b" * 40, stopping, byte_tokens) is None
    assert run_text("ba", stopping, byte_tokens) == (1, Ending("stop", "^b"))
    word = Stopping(MANY, regexes=(r"\bcat",))
    assert run_text("x" * 40 + "cat", word, byte_tokens) is None
    assert run_text("x" * 40 + " cat", word, byte_tokens) is not None


def test_an_invalid_regex_is_refused_by_its_text() -> None:
    with pytest.raises(ValueError, match=re.escape("'(a'")):
        RowStopping(Stopping(1, regexes=("(a",)), eos_ids=[], tokenizer=None)


def first_match(
    tokens: Sequence[int], stopping: Stopping, tokenizer: Any
) -> tuple[int, Ending] | None:
    """The same decision from the text of the whole answer."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(list(tokens[:count]))
        for string in stopping.strings:
            if string in text:
                return count, Ending("stop", string)
        for regex in stopping.regexes:
            if re.search(regex, text):
                return count, Ending("stop", regex)
    return None


@settings(deadline=None, max_examples=examples(300))
@given(
    data=st.binary(max_size=60)
    | st.text(alphabet="ab é€😀", max_size=40).map(lambda text: text.encode()),
    strings=st.lists(st.text(alphabet="ab é€😀", min_size=1, max_size=5), max_size=2),
    regexes=st.lists(
        st.sampled_from(
            ["a{2,3}b", "^ab", "é+", r"b\Z", "(?<=a)b", "(a|€b)😀", r"\bb"]
        ),
        max_size=2,
    ),
)
@example(data=b"\xc3" * 30 + b"ab", strings=["ab"], regexes=[])
@example(data=b"\x80" * 60, strings=["a"], regexes=["^ab"])
def test_the_tail_tells_as_much_as_the_whole_answer_of_bytes(
    byte_tokens: Any, data: bytes, strings: list[str], regexes: list[str]
) -> None:
    stopping = Stopping(MANY, strings=tuple(strings), regexes=tuple(regexes))
    expected = first_match(list(data), stopping, byte_tokens)
    assert run(list(data), stopping, byte_tokens) == expected


@settings(deadline=None, max_examples=examples(300))
@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=40),
    strings=st.lists(
        st.sampled_from(["STOP", "aé", " aS", "bé é", "OPab"]), max_size=2
    ),
    regexes=st.lists(st.sampled_from(["STO?P", "^aST", "é é", r"P\b "]), max_size=2),
)
def test_the_tail_tells_as_much_as_the_whole_answer_of_pieces(
    piece_tokens: Any, tokens: list[int], strings: list[str], regexes: list[str]
) -> None:
    stopping = Stopping(MANY, strings=tuple(strings), regexes=tuple(regexes))
    expected = first_match(tokens, stopping, piece_tokens)
    assert run(tokens, stopping, piece_tokens) == expected


def test_rules_end_an_answer_within_a_token(
    piece_tokens: Any, byte_tokens: Any
) -> None:
    json_rule = Stopping(MANY, rules=StopRules(json=True))
    assert run_text('{"a": [1]} and', json_rule, byte_tokens) == (
        10,
        Ending("stop", Cut("json")),
    )
    tokens = [PIECES.index(piece) for piece in ("a", "aST", "OPb", "a")]
    regex = Stopping(MANY, rules=StopRules(regexes=("STO",)))
    assert run(tokens, regex, piece_tokens) == (3, Ending("stop", Cut("regex", 2)))
    loop = Stopping(MANY, rules=StopRules(repetition=Repetition(min_tokens=6)))
    assert run_text("x" + "ab" * 9, loop, byte_tokens) == (
        9,
        Ending("stop", Cut("repetition")),
    )


def test_an_ending_token_wins_over_a_rule_and_a_rule_over_the_length(
    byte_tokens: Any,
) -> None:
    rules = StopRules(json=True, repetition=Repetition(min_tokens=6))
    stopping = Stopping(MANY, token_ids=frozenset({ord("a")}), rules=rules)
    assert run_text("aaaaaaaa", stopping, byte_tokens) == (1, Ending("stop", ord("a")))
    assert run_text("[1]", Stopping(3, rules=rules), byte_tokens) == (
        3,
        Ending("stop", Cut("json")),
    )


def test_a_regex_at_its_limits_aborts_its_row(byte_tokens: Any) -> None:
    stopping = Stopping(2_000, rules=StopRules(regexes=(".{900}y",)))
    found = run_text("x" * 1_999, stopping, byte_tokens)
    assert found is not None and found[1].reason == "abort"
    assert "fewer repeats" in (found[1].error or "")
