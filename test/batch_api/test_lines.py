"""The lines of output and error files, as OpenAI's clients read them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from builders import make_output, make_request

from sglang_batch.batch_api.lines import (
    InvalidLine,
    ResultLine,
    decode_envelope,
    invalid_line,
    loads_lenient,
    result_line,
    unrun_line,
)
from sglang_batch.batch_api.protocol import error_body
from sglang_batch.request import RequestOutput, engine_request_id


def parse(line: bytes) -> dict[str, Any]:
    assert b"\n" not in line
    parsed: dict[str, Any] = json.loads(line)
    assert list(parsed) == ["id", "custom_id", "response", "error"]
    assert parsed["id"].startswith("batch_req_")
    return parsed


def test_an_answer_has_its_body_as_an_object_and_no_error() -> None:
    body = {"object": "chat.completion", "choices": [{"index": 0}]}
    output = RequestOutput(200, "req-7", json.dumps(body).encode())
    line = parse(result_line(make_request(custom_id="a"), "batch_1", output))
    assert line["custom_id"] == "a"
    assert line["response"] == {"status_code": 200, "request_id": "req-7", "body": body}
    assert line["error"] is None


@pytest.mark.parametrize("index", [0, 17, 99_999_999, 123_456_789])
def test_a_line_and_its_request_have_the_same_number(index: int) -> None:
    request = make_request(index=index)
    rid = engine_request_id("batch_1", index)
    answered = result_line(request, "batch_1", RequestOutput(200, rid, b"{}"))
    invalid = invalid_line(index, "a", "batch_1", "code", "message")
    unrun = unrun_line(request, "batch_1", "code", "message")
    for written in (answered, invalid, unrun):
        line = parse(written)
        assert line["id"] == f"batch_req_{rid.removeprefix('batch_')}"
        assert line["response"] is None or line["response"]["request_id"] == rid
        assert msgspec.json.decode(written, type=ResultLine).index == index


def test_the_number_of_a_line_of_an_earlier_release_is_read() -> None:
    earlier = ResultLine("batch_req_ff00000011", "a", None, None)
    assert earlier.index == 17


def test_a_failed_request_has_its_error_inside_the_response() -> None:
    line = parse(result_line(make_request(), "batch_1", make_output(400)))
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"] == error_body("It failed.")
    assert line["error"] is None


def test_a_request_that_never_ran_has_no_response() -> None:
    line = parse(unrun_line(make_request(), "batch_1", "batch_cancelled", "Too late."))
    assert line["response"] is None
    assert line["error"] == {"code": "batch_cancelled", "message": "Too late."}


@pytest.mark.parametrize("custom_id", ["\u00e9\u2028", 'quote " and \\', "\0\n\r", "7"])
def test_any_custom_id_comes_back_as_it_was(custom_id: str) -> None:
    request = make_request(custom_id=custom_id)
    assert parse(unrun_line(request, "batch_1", "c", "m"))["custom_id"] == custom_id
    line = parse(result_line(request, "batch_1", make_output()))
    assert line["custom_id"] == custom_id


def test_line_ids_tell_all_lines_of_all_batches_apart() -> None:
    ids = {
        parse(unrun_line(make_request(index), batch_id, "c", "m"))["id"]
        for batch_id in ("batch_1", "batch_2")
        for index in range(300)
    }
    assert len(ids) == 600


def test_an_answer_goes_into_its_line_unchanged() -> None:
    body = b'{"logprob": -0.10, "big": 123456789012345678901234567890}'
    line = result_line(make_request(), "batch_1", RequestOutput(200, "r", body))
    assert body in line


def test_only_the_keys_that_are_there_are_found() -> None:
    assert decode_envelope(b'{"custom_id": null, "other": 1}') == {"custom_id": None}


@pytest.mark.parametrize("line", [b"", b"[]", b"1", b"{", b'{"body": 1e}', b"\xff"])
def test_a_line_that_is_no_json_object_is_invalid(line: bytes) -> None:
    with pytest.raises(InvalidLine):
        decode_envelope(line)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", "1".encode("utf-16"), b"[" * 100_000]
)
def test_unparseable_json_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        loads_lenient(data)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), 10**30, 1.5, "\ud800"])
def test_values_are_read_as_python_writes_them(value: object) -> None:
    assert loads_lenient(json.dumps(value).encode()) == value
