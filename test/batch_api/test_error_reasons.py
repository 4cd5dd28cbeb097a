"""Error lines by reason: which are the same, and how many are told apart."""

from __future__ import annotations

import json

import pytest

from sglang_batch.batch_api import lines
from sglang_batch.batch_api.lines import ErrorReasons, Reason


def body(message: str, code: str | None = "too_long") -> bytes:
    error = {"message": message, "type": "invalid_request_error", "code": code}
    return json.dumps({"error": error}).encode()


def reasons_of(*bodies: bytes) -> ErrorReasons:
    reasons = ErrorReasons()
    for each in bodies:
        reasons.add(each)
    return reasons


def test_numbers_and_quoted_text_make_no_difference() -> None:
    reasons = reasons_of(
        body("the prompt of 'a' has 9,324 tokens, of 0.5e3"),
        body("the prompt of 'b' has 12 tokens, of -3.25"),
        body("the prompt is empty"),
        body("the prompt is empty", code="empty"),
    )
    first = "the prompt of 'a' has 9,324 tokens, of 0.5e3"
    assert reasons.reasons() == [
        Reason("too_long", first, 2),
        Reason("too_long", "the prompt is empty", 1),
        Reason("empty", "the prompt is empty", 1),
    ]
    assert reasons.by_code() == {"too_long": 3, "empty": 1}


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        (body("no", code=None), "invalid_request_error", "no"),
        (b"not json", "unknown", ""),
        (b'{"error": "text"}', "unknown", ""),
        (b'{"error": {"code": 400, "message": null}}', "400", ""),
        (b"", "unknown", ""),
        (body("x" * 999, "y" * 999), "y" * 64, "x" * 200),
    ],
)
def test_any_answer_has_a_reason(answer: bytes, code: str, message: str) -> None:
    assert reasons_of(answer).reasons() == [Reason(code, message, 1)]


def test_messages_that_are_all_unlike_take_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lines, "MAX_REASONS", 5)
    monkeypatch.setattr(lines, "MAX_STORED", 3)
    names = [chr(ord("a") + i) * 3 for i in range(20)]
    reasons = reasons_of(*(body(name) for name in names), body("aaa"))
    assert reasons.reasons() == [
        Reason("too_long", "", 15),
        Reason("too_long", "aaa", 2),
        Reason("too_long", "bbb", 1),
    ]
    assert reasons.by_code() == {"too_long": 21}
    stored = json.loads(reasons.as_json() or "")
    assert stored[0] == {"code": "too_long", "message": "", "lines": 15}
    assert ErrorReasons().as_json() is None
