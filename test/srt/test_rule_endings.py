"""Stop rules of SGLang's own requests, whatever number of tokens a step accepts."""

from __future__ import annotations

import gc
import weakref
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from transformers import AutoTokenizer

from sglang_batch.batch_api.stop_rules import StopRules
from sglang_batch.srt.scheduler.answer_ends import watch_request

THINK_END = list(b"</think>")
MODEL = SimpleNamespace(
    think_end_ids=THINK_END, request_selectable_think_end_id_sequences=None
)


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    found = AutoTokenizer.from_pretrained(demo_model)
    found.additional_stop_token_ids = None
    return found


def request(
    rules: dict[str, Any], tokenizer: Any, *, reasons: bool = False, **params: Any
) -> tuple[Req, list[str]]:
    """A request with these rules, and the rules that have cut it."""
    text = StopRules.parse(rules).to_text()
    sampling = SamplingParams(custom_params={"stop_rules": text}, **params)
    sampling.normalize(tokenizer)
    req = Req(
        "r",
        "ab",
        array("q", [97, 98]),
        sampling,
        vocab_size=300,
        require_reasoning=reasons,
    )
    req.tokenizer = tokenizer
    cut: list[str] = []
    watch_request(req, tokenizer, MODEL, cut.append)  # type: ignore[arg-type]
    return req, cut


def decode(req: Req, text: str, step: int) -> Iterator[str]:
    """Accept a text's bytes, ``step`` at a time, until the request has ended."""
    tokens = text.encode()
    for start in range(0, len(tokens), step):
        accepted = tokens[start : start + step]
        req.output_ids.extend(accepted)
        req.update_finish_state(len(accepted))
        if req.finished():
            yield bytes(req.output_ids_through_stop.tolist()).decode()
            return


@pytest.mark.parametrize("step", [1, 2, 3, 5, 50])
@pytest.mark.parametrize(
    ("rules", "params", "text", "end", "matched"),
    [
        ({"json": True}, {}, '{"a": 1} and', '{"a": 1}', "stop_rules.json"),
        ({"regex": "EN[DT]"}, {}, "an END. END", "an END", "stop_rules.regex"),
        ({"repetition": {"min_tokens": 8}}, {}, "x" + "abc" * 9, "x" + "abc" * 4,
         "stop_rules.repetition"),
        # SGLang's stop string comes first, or the rule does.
        ({"json": True}, {"stop": "1"}, '{"a": 1} and', '{"a": 1', "1"),
        ({"json": True}, {"stop": "and"}, '{"a": 1} and', '{"a": 1}', "stop_rules.json"),
        ({"json": True}, {"max_new_tokens": 8}, '{"a": 1} and', '{"a": 1}',
         "stop_rules.json"),
        ({"json": True}, {"max_new_tokens": 7}, '{"a": 1} and', '{"a": 1', None),
    ],
)  # fmt: skip
def test_a_request_ends_where_its_rule_says(
    tokenizer: Any,
    rules: Any,
    params: Any,
    text: str,
    end: str,
    matched: str,
    step: int,
) -> None:
    req, cut = request(rules, tokenizer, **{"max_new_tokens": 90, **params})
    assert list(decode(req, text, step)) == [end]
    assert req.finished_reason.to_json().get("matched") == matched
    assert cut == [rule for rule in rules if matched == f"stop_rules.{rule}"]


@pytest.mark.parametrize("step", [1, 4])
def test_rules_read_what_follows_the_reasoning(tokenizer: Any, step: int) -> None:
    text = '[1] is</think>{"a": 1} and'
    req, _ = request({"json": True}, tokenizer, reasons=True, max_new_tokens=90)
    assert list(decode(req, text, step)) == ['[1] is</think>{"a": 1}']
    req, _ = request({"json": True}, tokenizer, max_new_tokens=90)
    assert list(decode(req, text, step)) == ["[1]"]


def test_a_pattern_at_its_limits_aborts_its_request(tokenizer: Any) -> None:
    req, cut = request({"regex": ".{900}y"}, tokenizer, max_new_tokens=2_000)
    assert list(decode(req, "x" * 1_900, 7))
    assert isinstance(req.finished_reason, FINISH_ABORT)
    assert "fewer repeats" in req.finished_reason.message
    assert cut == []


def test_rules_that_need_a_tokenizer_are_refused_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        schedule_batch, "get_parallel", lambda: SimpleNamespace(tp_rank=0)
    )
    req, _ = request({"json": True}, None)
    assert "need a tokenizer" in req.to_finish.message
    req, _ = request({"repetition": True}, None)
    assert req.to_finish is None


def test_only_a_request_with_rules_is_watched_and_each_is_freed(tokenizer: Any) -> None:
    for rules, watched in (({}, False), ({"json": True}, True)):
        req, _ = request(rules, tokenizer)
        assert ("update_finish_state" in vars(req)) is watched
        alive = weakref.ref(req)
        gc.disable()
        try:
            del req
            assert alive() is None
        finally:
            gc.enable()
