"""Grammars of rows, their masks, and answers chosen under them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from xgrammar import GrammarMatcher

from sglang_batch.dense.row_request import Sampling
from sglang_batch.dense.sampling import RowSampler, choose
from sglang_batch.run.demo_model import SPECIAL_IDS, VOCAB_SIZE, write_demo_model
from sglang_batch.srt.dense.grammars import Grammars

EOS = SPECIAL_IDS["<|end|>"]
WIDTH = VOCAB_SIZE + 50  # of the logits, more than the tokenizer has


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("demo")
    write_demo_model(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, vocab_size=WIDTH, eos_ids=[EOS])


def allowed(grammars: Grammars, row: GrammarMatcher) -> set[int]:
    mask = grammars.mask([row])
    assert mask is not None
    logits = torch.zeros(1, WIDTH)
    mask(logits)
    return set((logits[0] == 0).nonzero().flatten().tolist())


def accept_text(row: GrammarMatcher, text: str) -> None:
    for token in text.encode():
        assert row.accept_token(token)


def answer(grammars: Grammars, kind: str, text: str, seed: int) -> bytes:
    """An answer from random logits, at most 400 tokens."""
    row = grammars.row(kind, text)
    sampler = RowSampler(Sampling(temperature=1.0), vocab_size=WIDTH, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    while not row.is_terminated() and len(tokens) < 400:
        logits = torch.randn(1, WIDTH, generator=generator)
        logits[0, EOS] += 4.0
        logits[0, list(b'"}]')] += 4.0
        chosen = choose(logits, [sampler], mask=grammars.mask([row]))
        assert not chosen.failed
        tokens.append(chosen.tokens[0])
        sampler.append(tokens[-1])
        assert row.accept_token(tokens[-1])
    assert tokens[-1] == EOS
    return bytes(tokens[:-1])


def test_the_mask_allows_what_may_follow(grammars: Grammars) -> None:
    row = grammars.row("regex", "ab?")
    assert allowed(grammars, row) == {ord("a")}
    assert row.accept_token(ord("a"))
    assert allowed(grammars, row) == {ord("b"), EOS}
    assert row.accept_token(ord("b"))
    assert allowed(grammars, row) == {EOS}
    assert not row.is_terminated()
    assert row.accept_token(EOS)
    assert row.is_terminated()


def test_only_rows_with_a_grammar_that_goes_on_are_masked(grammars: Grammars) -> None:
    ended = grammars.row("regex", "a")
    accept_text(ended, "a")
    assert ended.accept_token(EOS)
    rows = [None, grammars.row("regex", "a"), ended, grammars.row("regex", "b")]
    mask = grammars.mask(rows)
    assert mask is not None
    logits = torch.zeros(4, WIDTH)
    mask(logits)
    assert (logits == 0).sum(dim=-1).tolist() == [WIDTH, 1, WIDTH, 1]
    assert logits[1, ord("a")] == 0 and logits[3, ord("b")] == 0
    assert grammars.mask([None, ended]) is None


def test_rows_of_one_grammar_are_at_places_of_their_own(grammars: Grammars) -> None:
    first, second = (grammars.row("regex", "xy") for _ in range(2))
    assert first.accept_token(ord("x"))
    assert allowed(grammars, first) == {ord("y")}
    assert allowed(grammars, second) == {ord("x")}


def test_columns_beyond_the_tokenizer_are_never_allowed(grammars: Grammars) -> None:
    anything = allowed(grammars, grammars.row("regex", r"(.|\n)*"))
    assert EOS in anything
    assert max(anything) < VOCAB_SIZE


def test_fewer_columns_than_tokens_are_enough(tokenizer: Any) -> None:
    narrow = Grammars(tokenizer, vocab_size=200, eos_ids=[10])
    mask = narrow.mask([narrow.row("regex", "a")])
    assert mask is not None
    logits = torch.zeros(1, 200)
    mask(logits)
    assert (logits == 0).nonzero().tolist() == [[0, ord("a")]]


def test_logits_of_another_width_are_refused(grammars: Grammars) -> None:
    mask = grammars.mask([grammars.row("regex", "a")])
    assert mask is not None
    with pytest.raises(ValueError, match=f"have 5 columns, the grammars {WIDTH}"):
        mask(torch.zeros(1, 5))


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"enum": ["x", "yy"]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(3))
def test_answers_under_a_schema_fit_it(grammars: Grammars, seed: int) -> None:
    value = json.loads(answer(grammars, "json_schema", json.dumps(SCHEMA), seed))
    assert set(value) == {"n", "s"}
    assert isinstance(value["n"], int)
    assert value["s"] in ("x", "yy")


@pytest.mark.parametrize("seed", range(3))
def test_answers_of_any_json_are_json(grammars: Grammars, seed: int) -> None:
    json.loads(answer(grammars, "json_schema", "$$ANY$$", seed))


def test_answers_under_a_regex_match_it(grammars: Grammars) -> None:
    text = answer(grammars, "regex", "[0-9]{3}-(yes|no)", 0).decode()
    assert re.fullmatch("[0-9]{3}-(yes|no)", text)


def test_answers_under_ebnf_keep_to_it(grammars: Grammars) -> None:
    text = answer(grammars, "ebnf", 'root ::= "(" root ")" | "x"', 0).decode()
    depth = text.count("(")
    assert text == "(" * depth + "x" + ")" * depth


@pytest.mark.parametrize(
    "tag",
    [
        {
            "structures": [
                {"begin": "<f>", "schema": SCHEMA["properties"]["s"], "end": "</f>"}
            ],
            "triggers": ["<f"],
            "at_least_one": True,
        },
        {
            "type": "structural_tag",
            "format": {
                "type": "tag",
                "begin": "<f>",
                "content": {"type": "json_schema", "json_schema": {"const": "x"}},
                "end": "</f>",
            },
        },
        {
            "type": "structural_tag",
            "format": {
                "type": "tag",
                "begin": "<f>",
                "content": {"type": "json_schema"},
                "end": "</f>",
            },
        },
    ],
    ids=["older", "newer", "without a schema"],
)
def test_structural_tags_lead_to_their_contents(grammars: Grammars, tag: Any) -> None:
    row = grammars.row("structural_tag", json.dumps(tag))
    accept_text(row, '<f>"x"</f>')
    assert EOS in allowed(grammars, row)
    other = grammars.row("structural_tag", json.dumps(tag))
    with pytest.raises(AssertionError):
        accept_text(other, "<f>}")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(a"),
        ("ebnf", "root ::= other"),
        ("json_schema", '{"type": 5}'),
        ("json_schema", "no JSON"),
        ("structural_tag", "[]"),
        ("structural_tag", "{}"),
        ("structural_tag", '{"structures": [{"begin": "<"}], "triggers": []}'),
    ],
)
def test_an_invalid_grammar_is_named(grammars: Grammars, kind: str, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"the {kind} {text!r} is invalid")):
        grammars.row(kind, text)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"items": {"multipleOf": 3}}, "at #/items .*multipleOf"),
        ({"anyOf": [{}, {"not": {}}]}, "at #/anyOf/1 .*not would be"),
        ({"$defs": {"a": {"format": "phone"}}}, r"at #/\$defs/a .*format 'phone'"),
        ({"properties": {"a": {"pattern": "b", "maxLength": 3}}}, "#/properties/a"),
    ],
    ids=str,
)
def test_a_schema_with_a_limit_that_is_not_kept_is_refused(
    grammars: Grammars, schema: Any, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        grammars.row("json_schema", json.dumps(schema))


def test_names_and_values_in_a_schema_are_no_keywords(grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"not": {"const": {"if": 1}}, "if": {"type": "integer"}},
    }
    grammars.row("json_schema", json.dumps(schema))
    number = {"type": "integer", "format": "int32"}
    grammars.row("json_schema", json.dumps(number))


def test_grammars_that_could_not_end_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="eos_ids is empty"):
        Grammars(tokenizer, vocab_size=WIDTH, eos_ids=[])
