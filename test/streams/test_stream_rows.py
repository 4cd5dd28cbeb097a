"""Rows of a stream as lines: bodies, lines of a file and templates, and what cannot be sent."""

from __future__ import annotations

import json
import re
from datetime import date
from decimal import Decimal
from functools import reduce
from typing import Any

import numpy as np
import pytest

from sglang_batch.errors import ConfigError
from sglang_batch.lang import streamer
from sglang_batch.lang.streamer import RowLines, StreamLine

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Is {{x}} prime?"}], "n": "{{n}}"}


def sent(line: StreamLine) -> Any:
    assert not line.refused
    return json.loads(line.line)


def test_a_body_becomes_a_line_of_the_endpoint() -> None:
    body = {"prompt": "a", "max_tokens": 3, "seed": 2**70}
    line = RowLines("/v1/completions").line(body, 5)
    assert sent(line) == {
        **{"custom_id": "5", "method": "POST", "url": "/v1/completions"},
        "body": body,
    }
    assert (line.index, line.row, line.custom_id) == (5, body, "5")


def test_a_line_of_a_file_keeps_its_id_and_endpoint() -> None:
    row = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"input": "x"},
    }
    for given in (row, json.dumps(row), json.dumps(row).encode()):
        assert sent(RowLines(CHAT).line(given, 0)) == row
    assert sent(RowLines(CHAT).line({"body": {}}, 3)) == {
        **{"custom_id": "3", "method": "POST", "url": CHAT, "body": {}}
    }


def test_a_template_is_filled_from_a_row_of_any_mapping() -> None:
    lines = RowLines(CHAT, ASK, "id")
    row = {"id": 7, "x": np.int64(13), "n": np.float32(0.5), "other": b"unused"}
    found = sent(lines.line(row, 0))
    assert found["custom_id"] == "7"
    assert found["body"]["messages"][0]["content"] == "Is 13 prime?"
    assert found["body"]["n"] == 0.5
    as_text = RowLines(CHAT, json.dumps(ASK)).line({"x": "{{n}}", "n": None}, 0)
    assert sent(as_text)["body"]["messages"][0]["content"] == "Is {{n}} prime?"


def test_values_that_json_lacks_are_written_as_in_tables() -> None:
    body = {
        **{"a": np.arange(3), "b": float("nan"), "c": date(2026, 1, 2)},
        **{"d": Decimal("0.10"), "e": (1, np.bool_(True)), "f": np.str_("x")},
    }
    assert sent(RowLines(CHAT).line(body, 0))["body"] == {
        **{"a": [0, 1, 2], "b": None, "c": "2026-01-02"},
        **{"d": "0.10", "e": [1, True], "f": "x"},
    }


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "row 4: it is not JSON"),
        (b"\xff", "row 4: it is not JSON"),
        ("[1]", "it must be a mapping or a JSON object; it is a list"),
        (None, "it is a NoneType"),
        ({"custom_id": 5, "body": {}}, "its custom_id 5 must be a string"),
        ({"custom_id": "", "body": {}}, "its custom_id '' must be a string"),
        ({"a": b"x"}, "row 4 holds bytes"),
        ({"a": object()}, "row 4 holds a object"),
        ({"a": float("inf")}, "row 4 holds infinity"),
        ({"a": np.longdouble(1)}, "row 4 holds a longdouble"),
        ({"prompt": "x" * streamer.MAX_ROW_BYTES}, "more than"),
        # The server would refuse the whole window for one of these.
        ({"prompt": "\ud83d cut"}, "row 4 has half of a surrogate"),
        ('{"prompt": "\\ud83d"}', "row 4 has half of a surrogate"),
        ({"seed": 10**5000}, "row 4 cannot be sent as JSON: .*4300 digits"),
        (
            {"x": reduce(lambda x, _: [x], range(2000), 1)},
            "row 4 cannot be sent as JSON",
        ),
    ],
    ids=str.split(
        "cut bytes list none number empty raw object infinity long large surrogate escape "
        "digits deep"
    ),
)
def test_a_row_that_cannot_be_sent_is_answered(row: Any, says: str) -> None:
    line = RowLines(CHAT).line(row, 4)
    answer = line.refusal()
    assert re.search(says, str(answer.error))
    assert (answer.index, answer.status_code, answer.ok) == (4, 400, False)
    assert answer.row is row and answer.text is None


@pytest.mark.parametrize("row", [{"x": 1}, {"n": 1}, {}, {"x": b"1", "n": 1}])
def test_a_row_that_does_not_fill_the_template_is_answered(row: Any) -> None:
    assert "column" in str(RowLines(CHAT, ASK).line(row, 0).refusal().error)


@pytest.mark.parametrize(
    ("url", "template", "id_column"),
    [
        ("/v1/nothing", None, None),
        (CHAT, {"a": "b"}, None),
        (CHAT, None, "id"),
        (CHAT, "{", None),
    ],
)
def test_arguments_that_cannot_be_used(url: str, template: Any, id_column: Any) -> None:
    with pytest.raises(ConfigError):
        RowLines(url, template, id_column)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"choices": [{"message": {"content": "a"}}]}, "a"),
        ({"choices": [{"message": {"content": None}}]}, None),
        ({"choices": [{"text": "b"}]}, "b"),
        ({"data": [{"embedding": [1.0]}]}, None),
        ({"choices": []}, None),
        ({"choices": [{"message": {"content": None}, "text": "b"}]}, None),
        ({"content": [{"type": "thinking", "thinking": "no"}, {"text": "c"}]}, "c"),
        ({"output": [{"type": "message", "content": [{"text": "d"}]}, {}]}, "d"),
        ({"text": "e", "usage": {}}, "e"),
        ({"scores": [0.5]}, None),
        ([{"results": []}], None),
    ],
)
def test_the_text_of_an_answer(body: Any, text: str | None) -> None:
    line = RowLines(CHAT).line({}, 0)
    answer = line.answered(200, json.dumps(body).encode())
    assert (answer.text, answer.body, answer.error) == (text, body, None)
