"""Lines of result files as the results of a message batch."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import make_line

from sglang_batch.batch_api import protocol
from sglang_batch.batch_api.lines import LineError
from sglang_batch.batch_api.message_batches import (
    message_batch_object,
    rejected_line,
    results,
    results_without_files,
)

Row = dict[str, Any]


def result_line(
    index: int, status_code: int = 200, body: object = None, code: str | None = None
) -> bytes:
    """A line of an output or error file; ``code`` is for one that never ran."""
    response = {"status_code": status_code, "request_id": "rid", "body": body}
    line = {
        "id": f"batch_req_{'f' * 32}{index:08x}",
        "custom_id": f"r{index}",
        "response": None if code else response,
        "error": {"code": code, "message": "Why."} if code else None,
    }
    return json.dumps(line).encode() + b"\n"


def read(lines: Any) -> list[tuple[str, Row]]:
    parsed = [json.loads(line) for line in lines]
    return [(line["custom_id"], line["result"]) for line in parsed]


def make_row(status: str = "completed", **fields: Any) -> Row:
    return {
        "id": "batch_1",
        "status": status,
        "created_at": 0,
        "expires_at": 86_400,
        "cancelling_at": None,
        "metadata": json.dumps({"requests": "10"}),
        "errors": None,
        "output_file_id": None,
        "error_file_id": None,
        "completed": 0,
        "failed": 0,
        f"{status}_at": 60,
        **fields,
    }


def test_answers_and_errors_come_in_the_order_of_the_requests() -> None:
    outputs = [result_line(i, body={"id": i}) for i in (1, 4, 17)]
    errors = [result_line(i, 500, {}) for i in (0, 2, 16)]
    found = read(results(outputs, errors, []))
    assert [name for name, _ in found] == ["r0", "r1", "r2", "r4", "r16", "r17"]
    assert found[1][1] == {"type": "succeeded", "message": {"id": 1}}


def test_rejected_requests_keep_their_positions_among_the_others() -> None:
    error = LineError("model_not_found", "No such model.")
    rejected = [rejected_line(f"x{i}", i, error) for i in (0, 2, 3, 6)]
    outputs = [result_line(i) for i in range(3)]
    names = [name for name, _ in read(results(outputs, [], rejected))]
    assert names == ["x0", "r0", "x2", "x3", "r1", "r2", "x6"]


@pytest.mark.parametrize(
    ("line", "result"),
    [
        (result_line(0, code="batch_expired"), {"type": "expired"}),
        (result_line(0, code="batch_cancelled"), {"type": "canceled"}),
        (result_line(0, code="other"), ("api_error", "Why.")),
        (
            result_line(0, 404, {"error": {"message": "None."}}),
            ("not_found_error", "None."),
        ),
        (
            result_line(
                0, 503, {"error": {"type": "timeout_error", "message": "Late."}}
            ),
            ("timeout_error", "Late."),
        ),
        (
            result_line(
                0, 400, {"error": {"type": "BadRequestError", "message": "Bad."}}
            ),
            ("invalid_request_error", "Bad."),
        ),
        (result_line(0, 400, "text"), ("invalid_request_error", "The request failed.")),
    ],
)
def test_a_result_without_success_gives_the_reason(line: bytes, result: Any) -> None:
    [(_, found)] = read(results([], [line], []))
    if isinstance(result, tuple):
        assert set(found) == {"type", "error"}
        assert set(found["error"]) == {"type", "error", "request_id"}
        assert (found["type"], found["error"]["type"]) == ("errored", "error")
        kind, message = result
        result = {"type": kind, "message": message}
        found = found["error"]["error"]
    assert found == result


@pytest.mark.parametrize(
    ("status", "kind"),
    [("failed", "errored"), ("cancelled", "canceled"), ("expired", "expired")],
)
def test_a_batch_without_result_files_has_one_result_for_all(
    status: str, kind: str
) -> None:
    data = [{"code": "c", "line": 2, "message": "Bad.", "param": None}]
    row = make_row(status, errors=json.dumps({"object": "list", "data": data}))
    inputs = [make_line(custom_id).encode() for custom_id in "ab"]
    found = read(results_without_files(inputs, [], row))
    assert [(name, each["type"]) for name, each in found] == [("a", kind), ("b", kind)]
    if kind == "errored":
        assert found[0][1]["error"]["error"] == {
            "type": "invalid_request_error",
            "message": "Line 2: Bad.",
        }


@pytest.mark.parametrize(
    ("status", "counts"),
    [
        ("validating", {"processing": 10}),
        ("finalizing", {"processing": 10}),
        ("completed", {"succeeded": 5, "errored": 5}),
        ("cancelled", {"succeeded": 5, "errored": 3, "canceled": 2}),
        ("expired", {"succeeded": 5, "errored": 3, "expired": 2}),
        ("failed", {"errored": 10}),
    ],
)
def test_counts_add_up_and_say_nothing_before_the_end(
    status: str, counts: dict[str, int]
) -> None:
    row = make_row(
        status,
        metadata=json.dumps({"requests": "10", "rejected": "1"}),
        completed=5,
        failed=4 if status == "completed" else 2,
        output_file_id=None if status == "failed" else "file-1",
    )
    shown = message_batch_object(row, "http://host/root/")
    found = {name: n for name, n in shown["request_counts"].items() if n}
    assert found == counts
    ended = status in protocol.ENDED_STATUSES
    assert shown["processing_status"] == ("ended" if ended else "in_progress")
    assert shown["ended_at"] == ("1970-01-01T00:01:00Z" if ended else None)
    url = "http://host/root/v1/messages/batches/msgbatch_1/results"
    assert shown["results_url"] == (url if ended else None)
