"""What is refused at once, and what fails a batch."""

from __future__ import annotations

import json
from typing import Any

import openai
from contract_base import CHAT, Calls, but_for_cost, refused, strictly
from openai.types import Batch


def _errors(calls: Calls, batch: Batch) -> list[tuple[Any, ...]]:
    """(line, code, param, message) of a batch that has to fail."""
    batch = calls.ended(strictly(batch))
    assert batch.status == "failed" and batch.failed_at is not None, batch
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    assert batch.in_progress_at is None and batch.completed_at is None
    counts = batch.request_counts
    assert counts is None or (counts.total, counts.completed, counts.failed) == (0,) * 3
    assert batch.errors is not None and batch.errors.object == "list"
    return [(e.line, e.code, e.param, e.message) for e in batch.errors.data or []]


def bad_lines_fail_the_batch_with_every_reason(calls: Calls) -> None:
    good = calls.chat("good")
    lines: list[Any] = [
        b"{not json",
        b"[1, 2]",
        {k: v for k, v in good.items() if k != "custom_id"},
        {k: v for k, v in calls.chat("b").items() if k != "method"},
        {k: v for k, v in calls.chat("c").items() if k != "url"},
        {k: v for k, v in calls.chat("d").items() if k != "body"},
        calls.chat("e") | {"method": "GET"},
        calls.chat("f") | {"url": "/v1/embeddings"},
        calls.chat("g", model="gpt-9"),
        calls.chat("h", model=None),
        calls.line("i", CHAT, {}),
        calls.chat("j", stream=True),
        calls.chat("k") | {"custom_id": 7},
        good,
        good,
    ]
    content = b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n"
        for line in lines
    )
    found = _errors(calls, calls.start(content))
    assert [error[:3] for error in found] == [
        (1, "invalid_json_line", None),
        (2, "invalid_json_line", None),
        (3, "missing_required_parameter", "custom_id"),
        (4, "missing_required_parameter", "method"),
        (5, "missing_required_parameter", "url"),
        (6, "missing_required_parameter", "body"),
        (7, "invalid_method", "method"),
        (8, "invalid_url", "url"),
        (9, "model_not_found", "body.model"),
        (10, "invalid_request", "body.model"),
        (11, "invalid_request", "body.messages"),
        (12, "streaming_unsupported", "body.stream"),
        (13, "invalid_request", "custom_id"),
        (15, "duplicate_custom_id", "custom_id"),
    ]
    messages = {line: message for line, _, _, message in found}
    assert messages[1] == "This line is not parseable as valid JSON."
    assert messages[3] == "Missing required parameter: 'custom_id'."
    assert messages[8].startswith(
        "The URL provided for this request does not match the batch endpoint."
    )
    assert messages[9].startswith(
        "The provided model 'gpt-9' is not supported by the Batch API."
    )
    assert messages[10] == "Model parameter is required."
    assert messages[11] == "Messages parameter is required."
    assert messages[12] == (
        "Chat Completions: Streaming is not supported in the Batch API."
    )


def an_input_that_is_not_there_fails_the_batch(calls: Calls) -> None:
    gone = calls.upload([calls.chat("a")])
    calls.api.files.delete(gone.id)
    for file_id in (gone.id, "file-nope"):
        batch = calls.api.batches.create(
            input_file_id=file_id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )
        ((line, code, param, message),) = _errors(calls, batch)
        assert (line, code, param) == (None, "invalid_request", "file_id")
        assert message.startswith(f"Cannot find file {file_id}")


def an_empty_input_fails_the_batch(calls: Calls) -> None:
    for content in (b"\n\n", b"\xef\xbb\xbf\n"):
        ((_, code, _, message),) = _errors(calls, calls.start(content))
        assert code == "empty_file" and "empty" in message


def lines_end_where_json_says(calls: Calls) -> None:
    """A mark at the beginning, CRLF, blank lines, a bare return, U+2028 in a text."""
    body = json.dumps(calls.chat("one\u2028line"), ensure_ascii=False)
    odd = "\ufeff" + body + "\r\n\n  \n" + json.dumps(calls.chat("two")) + "\r"
    batch = calls.ended(calls.start(odd.encode()))
    assert batch.status == "completed", batch
    ids = [line["custom_id"] for line in calls.lines(batch.output_file_id)]
    assert ids == ["one\u2028line", "two"]


def a_batch_that_cannot_be_is_refused(calls: Calls) -> None:
    good = calls.upload([calls.chat("a")]).id
    other = calls.upload([calls.chat("a")], "user_data").id

    def create(**fields: Any) -> Any:
        fields = {
            "input_file_id": good,
            "endpoint": CHAT,
            "completion_window": "24h",
            **fields,
        }
        return lambda: calls.api.batches.create(**fields)

    says = refused(
        create(endpoint="/v1/magic"), param="endpoint", code="invalid_value"
    ).message
    assert CHAT in says and "/v1/magic" in says
    refused(
        create(completion_window="soon"),
        param="completion_window",
        code="invalid_value",
        says="completion_window",
    )
    refused(
        create(metadata={"tags": ["a"]}),
        param="metadata.tags",
        code="invalid_type",
        says="Invalid type for 'metadata.tags': expected a string, but got an array "
        "instead.",
    )
    too_many = {f"key {i}": "" for i in range(17)}
    for metadata in (too_many, {"k" * 65: ""}, {"k": "v" * 513}):
        error = refused(create(metadata=metadata))
        assert str(error.param).startswith("metadata")
    for anchor, seconds in (
        ("created_at", 3599),
        ("created_at", 2_592_001),
        ("x", 7200),
    ):
        after = {"anchor": anchor, "seconds": seconds}
        error = refused(create(output_expires_after=after))
        assert str(error.param).startswith("output_expires_after")
    refused(create(input_file_id=other), param="input_file_id", says="purpose")
    for key in ("input_file_id", "endpoint", "completion_window"):
        refused(
            create(extra_body={key: None}),
            param=key,
            code="missing_required_parameter",
            says=f"Missing required parameter: '{key}'.",
        )
    refused(create(extra_body={"metadata": "text"}), param="metadata")


def a_batch_nobody_knows_is_not_found(calls: Calls) -> None:
    batches = calls.api.batches
    for batch_id in ("batch_nope", "file-nope", "\u6f22", "batch nope"):
        for call in (batches.retrieve, batches.cancel):
            refused(
                lambda call=call, name=batch_id: call(name),  # type: ignore[misc]
                openai.NotFoundError,
                param="id",
                says=f"No batch found with id '{batch_id}'.",
            )


def an_ended_batch_cannot_be_cancelled(calls: Calls) -> None:
    done = calls.ended(calls.start([calls.chat("a")]))
    failed = calls.ended(calls.start(b"\n"))
    for batch in (done, failed):
        error = refused(
            lambda batch=batch: calls.api.batches.cancel(batch.id),  # type: ignore[misc]
            openai.ConflictError,
            param=None,
            code=None,
            says=f"Cannot cancel a batch with status '{batch.status}'.",
        )
        assert error.response.headers["x-should-retry"] == "false"
        again = calls.api.batches.retrieve(batch.id)
        assert but_for_cost(again) == but_for_cost(batch)


CHECKS = (
    bad_lines_fail_the_batch_with_every_reason,
    an_input_that_is_not_there_fails_the_batch,
    an_empty_input_fails_the_batch,
    lines_end_where_json_says,
    a_batch_that_cannot_be_is_refused,
    a_batch_nobody_knows_is_not_found,
    an_ended_batch_cannot_be_cancelled,
)
