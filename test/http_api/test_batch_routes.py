"""Batches over HTTP."""

from __future__ import annotations

import openai
import pytest
from builders import (
    CHAT,
    MODEL,
    answer_text,
    make_body,
    make_line,
    make_lines,
    parse_lines,
)
from openai.types import Batch
from route_server import Server, error_of

NULLABLE = [
    "model",
    "errors",
    "output_file_id",
    "error_file_id",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
    "request_counts",
    "usage",
    "metadata",
]


def test_a_batch_goes_from_upload_to_content(server: Server) -> None:
    lines = [*make_lines(3), make_line("fails")]
    created = server.start(*lines, metadata={"k": "v"})
    assert created.id.startswith("batch_")
    assert (created.object, created.status) == ("batch", "validating")
    assert created.metadata == {"k": "v"}
    batch = server.ended(created)
    assert batch.status == "completed"
    assert batch.model == MODEL
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {
        "total": 4,
        "completed": 3,
        "failed": 1,
    }
    assert batch.usage is not None
    usage = batch.usage.model_dump()
    assert usage.pop("engine_seconds") >= 0
    assert usage == {
        "input_tokens": 24,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 24,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 48,
    }
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    outputs = parse_lines(server.client.files.content(batch.output_file_id).read())
    assert [answer_text(line) for line in outputs] == [f"prompt {i}" for i in range(3)]
    [failed] = parse_lines(server.client.files.content(batch.error_file_id).read())
    assert failed["response"]["body"]["error"]["message"] == "The request failed."
    file = server.client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert server.client.batches.retrieve(batch.id) == batch


def test_a_new_batch_has_every_key_and_null_for_what_is_not_yet(server: Server) -> None:
    answer = server.http.post(
        "/v1/batches",
        json={
            "input_file_id": server.upload(),
            "endpoint": CHAT,
            "completion_window": "24h",
        },
    )
    assert answer.status_code == 200
    batch = answer.json()
    assert set(batch) == set(Batch.model_fields)
    assert set(NULLABLE) < set(batch)
    known = {key for key in NULLABLE if batch[key] is not None}
    assert known == {"expires_at", "request_counts", "usage"}
    assert batch["expires_at"] - batch["created_at"] == 86400
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}


def test_a_bad_input_is_reported_by_the_batch(server: Server) -> None:
    batch = server.ended(server.start(make_line("a"), make_line("a"), "bad"))
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.object == "list"
    assert batch.errors.data is not None
    assert [(e.line, e.code, e.param) for e in batch.errors.data] == [
        (2, "duplicate_custom_id", "custom_id"),
        (3, "invalid_json_line", None),
    ]


def test_an_input_with_names_no_text_can_hold_is_reported_too(server: Server) -> None:
    batch = server.ended(server.start(make_line(body=make_body(model="\ud800"))))
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [error.code for error in batch.errors.data] == ["model_not_found"]


def test_a_missing_input_file_is_reported_by_the_batch(server: Server) -> None:
    batch = server.ended(server.start(input_file_id="file-none"))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    [error] = batch.errors.data
    assert (error.code, error.line, error.param) == ("invalid_request", None, "file_id")
    assert error.message == "Cannot find file file-none."


def test_a_running_batch_is_cancelled_and_keeps_its_answers(server: Server) -> None:
    server.call(server.engine.hold, ["r2", "r3"])
    batch = server.start(*make_lines(4))
    server.call(server.engine.until_stalled, 2, 2)
    asked = server.client.batches.cancel(batch.id)
    assert asked.status in ("cancelling", "cancelled")
    assert asked.cancelling_at is not None
    batch = server.ended(asked)
    assert batch.status == "cancelled"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {
        "total": 4,
        "completed": 2,
        "failed": 0,
    }
    assert batch.error_file_id is not None
    unrun = parse_lines(server.client.files.content(batch.error_file_id).read())
    assert [line["error"]["code"] for line in unrun] == ["batch_cancelled"] * 2
    # Once more is no error.
    assert server.client.batches.cancel(batch.id) == batch


@pytest.mark.parametrize(
    ("line", "status"), [(make_line(), "completed"), ("bad", "failed")]
)
def test_a_batch_that_is_over_cannot_be_cancelled_and_clients_do_not_retry(
    server: Server, line: str, status: str
) -> None:
    batch = server.ended(server.start(line))
    with pytest.raises(openai.ConflictError) as raised:
        server.client.with_options(max_retries=2).batches.cancel(batch.id)
    assert raised.value.response.headers["x-should-retry"] == "false"
    assert raised.value.body == {
        "message": f"Cannot cancel a batch with status '{status}'.",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    assert server.client.batches.retrieve(batch.id) == batch


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/batches/batch_none"), ("POST", "/v1/batches/batch_none/cancel")],
)
def test_an_unknown_batch_is_not_found(
    bare_server: Server, method: str, path: str
) -> None:
    answer = bare_server.http.request(method, path)
    assert answer.status_code == 404
    assert error_of(answer) == {
        "message": "No batch found with id 'batch_none'.",
        "type": "invalid_request_error",
        "param": "id",
        "code": None,
    }
