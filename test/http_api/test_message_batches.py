"""Anthropic's Message Batches over HTTP, with the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types.messages import MessageBatch
from builders import MODEL
from route_server import Server, serving

from sglang_batch.server import runner as runner_module

PATH = "/v1/messages/batches"


class AppTransport(httpx2.BaseTransport):
    """Carries the client's requests to an application in this process."""

    def __init__(self, server: Server) -> None:
        self._http = server.http

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = self._http.request(
            request.method,
            str(request.url),
            content=request.read(),
            headers=list(request.headers.multi_items()),
        )
        return httpx2.Response(
            answer.status_code,
            headers=list(answer.headers.multi_items()),
            content=answer.content,
        )


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of the test's own that looks for work often from its start on."""
    monkeypatch.setattr(runner_module, "POLL_S", 0.002)
    with serving(tmp_path) as server:
        yield server


@pytest.fixture
def batches(server: Server) -> Any:
    """The batches of a client without retries."""
    client = anthropic.Anthropic(
        api_key="none",
        base_url="http://testserver",
        max_retries=0,
        http_client=httpx2.Client(transport=AppTransport(server)),
    )
    return client.messages.batches


def make_params(text: str = "hello", without: str = "", **fields: Any) -> Any:
    params = {
        "model": MODEL,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": text}],
        **fields,
    }
    params.pop(without, None)
    return params


def make_requests(*custom_ids: str) -> Any:
    return [{"custom_id": each, "params": make_params(each)} for each in custom_ids]


def ended(batches: Any, batch: MessageBatch) -> MessageBatch:
    while batch.processing_status != "ended":
        batch = batches.retrieve(batch.id)
    return batch


def counts_of(batch: MessageBatch) -> dict[str, int]:
    """The request counts that are not zero."""
    return {name: n for name, n in batch.request_counts.model_dump().items() if n}


def results_of(batches: Any, batch: MessageBatch) -> list[tuple[str, str]]:
    return [(each.custom_id, each.result.type) for each in batches.results(batch.id)]


def error_of(answer: Any, kind: str) -> str:
    """The message of an answer's error, which must be Anthropic's."""
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert body["request_id"] == answer.headers["request-id"]
    message: str = body["error"]["message"]
    return message


def test_a_batch_goes_from_requests_to_results(server: Server, batches: Any) -> None:
    server.call(server.engine.hold, ["b"])
    created = batches.create(requests=make_requests("a", "fails", "b"))
    assert created.id.startswith("msgbatch_")
    assert (created.type, created.processing_status) == ("message_batch", "in_progress")
    assert created.expires_at - created.created_at == timedelta(hours=24)
    assert created.created_at.utcoffset() == timedelta(0)
    server.call(server.engine.until_stalled, 2, 1)
    # What has ended is not told before all has.
    running = batches.retrieve(created.id)
    assert counts_of(running) == {"processing": 3}
    assert (running.ended_at, running.results_url) == (None, None)
    server.call(server.engine.release)
    batch = ended(batches, created)
    assert counts_of(batch) == {"succeeded": 2, "errored": 1}
    assert batch.ended_at is not None
    assert (batch.cancel_initiated_at, batch.archived_at) == (None, None)
    assert batch.results_url is not None
    assert batch.results_url.endswith(f"{PATH}/{batch.id}/results")
    assert server.http.get(batch.results_url).status_code == 200
    results = list(batches.results(batch.id))
    assert [result.custom_id for result in results] == ["a", "fails", "b"]
    kinds = [result.result.type for result in results]
    assert kinds == ["succeeded", "errored", "succeeded"]
    answer = results[2].result.message
    assert answer.choices[0]["message"]["content"] == "b"  # as the engine has it
    failure = results[1].result.error
    assert failure.type == "error"
    assert failure.error.type == "invalid_request_error"
    assert failure.error.message == "The request failed."


def test_params_reach_the_engine_as_they_were_written(server: Server) -> None:
    params = (
        '{"model": "demo",\n "max_tokens": 123456789012345678901234567890,'
        '\n "messages": [{"role": "user", "content": "\\u00e9\\n"}]}'
    )
    body = f'{{"requests": [{{"params": {params}, "custom_id": "a"}}]}}'
    assert server.http.post(PATH, content=body).status_code == 200
    [row] = server.service.store.list_batches(after=None, limit=2)
    written = server.service.store.file_path(row["input_file_id"]).read_text()
    assert params.replace("\n", " ") in written
    assert written.count("\n") == 1
    assert list(server.service.store.incoming.iterdir()) == []


@pytest.mark.parametrize(
    ("headers", "num_made"),
    [
        ({}, 2),
        ({"x-stainless-retry-count": "1"}, 1),
        ({"idempotency-key": "key"}, 1),
    ],
)
def test_a_call_that_is_repeated_makes_one_batch(
    server: Server, batches: Any, headers: dict[str, str], num_made: int
) -> None:
    made = [
        batches.create(requests=make_requests("a"), extra_headers=headers).id
        for _ in range(2)
    ]
    other = batches.create(
        requests=make_requests("b"),
        extra_headers={"x-stainless-retry-count": "1"},
    )
    assert len(set(made)) == num_made
    assert other.id not in made


def test_requests_that_cannot_run_are_errors_of_their_own(
    server: Server, batches: Any
) -> None:
    bad = [
        {"custom_id": "model", "params": make_params(model="other")},
        {"custom_id": "messages", "params": make_params(without="messages")},
    ]
    a, b = make_requests("a", "b")
    batch = ended(batches, batches.create(requests=[bad[0], a, bad[1], b]))
    assert counts_of(batch) == {"succeeded": 2, "errored": 2}
    results = list(batches.results(batch.id))
    assert [result.custom_id for result in results] == ["model", "a", "messages", "b"]
    first, second = (results[i].result.error.error for i in (0, 2))
    assert (first.type, second.type) == ("not_found_error", "invalid_request_error")
    assert "'other'" in first.message
    assert second.message == "Messages parameter is required."
    assert sorted(server.engine.answered) == ["a", "b"]


def test_a_batch_of_nothing_but_errors_ends(server: Server, batches: Any) -> None:
    requests = make_requests("a", "b")
    for request in requests:
        request["params"]["model"] = "other"
    batch = ended(batches, batches.create(requests=requests))
    assert counts_of(batch) == {"errored": 2}
    assert results_of(batches, batch) == [("a", "errored"), ("b", "errored")]


def test_a_batch_that_failed_has_a_result_for_every_request(
    server: Server, batches: Any
) -> None:
    server.call(server.engine.hold, ["a"])
    first = batches.create(requests=make_requests("a"))
    server.call(server.engine.until_stalled, 0, 1)
    rejected = {"custom_id": "r", "params": make_params(model="other")}
    batch = batches.create(requests=[rejected, *make_requests("b", "c")])
    store = server.service.store
    errors = [{"code": "internal_error", "line": None, "message": "No.", "param": None}]
    batch_id = f"batch_{batch.id.removeprefix('msgbatch_')}"
    assert store.transition(
        batch_id,
        ("validating", "in_progress"),
        "failed",
        failed_at=batch.created_at.timestamp(),
        errors=json.dumps({"object": "list", "data": errors}),
    )
    batch = batches.retrieve(batch.id)
    assert batch.processing_status == "ended"
    assert batch.ended_at == batch.created_at
    assert counts_of(batch) == {"errored": 3}
    results = list(batches.results(batch.id))
    assert [result.custom_id for result in results] == ["r", "b", "c"]
    assert [result.result.error.error.type for result in results] == [
        "not_found_error",
        "api_error",
        "api_error",
    ]
    server.call(server.engine.release)
    ended(batches, first)


def test_a_canceled_batch_keeps_what_was_answered(server: Server, batches: Any) -> None:
    server.call(server.engine.hold, ["b", "c"])
    batch = batches.create(requests=make_requests("a", "b", "c"))
    server.call(server.engine.until_stalled, 1, 2)
    with pytest.raises(anthropic.BadRequestError, match=r"has not ended\. Cancel it"):
        batches.delete(batch.id)
    asked = batches.cancel(batch.id)
    assert asked.processing_status in ("canceling", "ended")
    assert asked.cancel_initiated_at is not None
    batch = ended(batches, asked)
    assert counts_of(batch) == {"succeeded": 1, "canceled": 2}
    assert results_of(batches, batch) == [
        ("a", "succeeded"),
        ("b", "canceled"),
        ("c", "canceled"),
    ]
    assert batches.cancel(batch.id) == batch  # once more is no error


def test_a_batch_that_has_ended_is_not_canceled(server: Server, batches: Any) -> None:
    batch = ended(batches, batches.create(requests=make_requests("a")))
    with pytest.raises(anthropic.BadRequestError, match="it has ended") as raised:
        batches.cancel(batch.id)
    assert raised.value.request_id == raised.value.response.json()["request_id"]
    assert batches.retrieve(batch.id) == batch


def test_a_deleted_batch_is_gone_with_its_files(server: Server, batches: Any) -> None:
    rejected = {"custom_id": "r", "params": make_params(model="other")}
    requests = [*make_requests("a", "fails"), rejected]
    batch = ended(batches, batches.create(requests=requests))
    deleted = batches.delete(batch.id)
    assert (deleted.id, deleted.type) == (batch.id, "message_batch_deleted")
    for call in (batches.retrieve, batches.cancel, batches.results):
        with pytest.raises(anthropic.NotFoundError):
            call(batch.id)
    assert server.http.get("/v1/files").json()["data"] == []
    assert list((server.service.store.directory / "files").iterdir()) == []


def test_results_that_are_kept_no_longer_are_not_found(
    server: Server, batches: Any
) -> None:
    batch = ended(batches, batches.create(requests=make_requests("a")))
    [file] = server.http.get("/v1/files?purpose=batch_output").json()["data"]
    server.http.delete(f"/v1/files/{file['id']}")
    assert batches.retrieve(batch.id).results_url is None
    answer = server.http.get(f"{PATH}/{batch.id}/results")
    assert answer.status_code == 404
    assert "no longer kept" in error_of(answer, "not_found_error")


def test_batches_are_listed_newest_first_over_pages(
    server: Server, batches: Any
) -> None:
    ids = [batches.create(requests=make_requests("a")).id for _ in range(5)][::-1]
    assert [each.id for each in batches.list(limit=2)] == ids  # it asks for the rest
    page = batches.list(limit=2, after_id=ids[0])
    assert [each.id for each in page.data] == ids[1:3]
    assert (page.first_id, page.last_id, page.has_more) == (ids[1], ids[2], True)
    page = batches.list(limit=2, before_id=ids[4])
    assert [each.id for each in page.data] == ids[2:4]
    assert page.has_more
    page = page.get_next_page()
    assert [each.id for each in page.data] == ids[:2]
    assert not page.has_more
    assert batches.list(after_id=ids[4]).data == []


def test_neither_api_sees_the_batches_of_the_other(
    server: Server, batches: Any
) -> None:
    theirs = batches.create(requests=make_requests("a"))
    ours = server.start()
    assert [each.id for each in batches.list()] == [theirs.id]
    assert [each.id for each in server.client.batches.list()] == [ours.id]
    with pytest.raises(anthropic.NotFoundError):
        batches.retrieve(ours.id.replace("batch_", "msgbatch_"))
    hidden = theirs.id.replace("msgbatch_", "batch_")
    for method, path in (("GET", ""), ("POST", "/cancel")):
        answer = server.http.request(method, f"/v1/batches/{hidden}{path}")
        assert answer.status_code == 404


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "not a list of requests"),
        ("nonsense", "not a list of requests"),
        ("[]", "Expected `object`"),
        ("{}", "missing required field `requests`"),
        ('{"requests": []}', "0 requests"),
        ('{"requests": [{"custom_id": "a"}]}', "missing required field `params`"),
        ('{"requests": [{"params": {}}]}', "missing required field `custom_id`"),
        ('{"requests": [{"custom_id": 1, "params": {}}]}', "Expected `str`"),
        ('{"requests": [{"custom_id": "a b", "params": {}}]}', "requests.0.custom_id"),
        ('{"requests": [{"custom_id": "", "params": {}}]}', "requests.0.custom_id"),
        (
            '{"requests": [{"custom_id": "' + 65 * "a" + '", "params": {}}]}',
            "requests.0.custom_id",
        ),
        ('{"requests": [{"custom_id": "a", "params": []}]}', "requests.0.params"),
        (
            json.dumps({"requests": make_requests("a", "b", "a")}),
            "requests.2.custom_id: 'a' is the custom_id of requests.0 too",
        ),
        (
            json.dumps(
                {"requests": [{"custom_id": "a", "params": make_params(stream=True)}]}
            ),
            "requests.0.params.stream: Messages: Streaming is not supported",
        ),
        (
            b'{"requests": [{"custom_id": "a", "params": {"model": "\xff"}}]}',
            "requests.0.params: This line is not parseable",
        ),
    ],
)
def test_what_is_no_batch_is_refused(
    bare_server: Server, body: str | bytes, message: str
) -> None:
    answer = bare_server.http.post(PATH, content=body)
    assert answer.status_code == 400
    assert message in error_of(answer, "invalid_request_error")
    assert bare_server.http.get(PATH).json()["data"] == []
    assert list((bare_server.service.store.directory / "files").iterdir()) == []


def test_a_body_that_is_too_large_is_refused(
    bare_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_batch.batch_api.message_batches.MAX_BYTES", 100)
    answer = bare_server.http.post(PATH, content=101 * b" ")
    assert answer.status_code == 413
    assert "at most 100 bytes" in error_of(answer, "request_too_large")


@pytest.mark.parametrize(
    ("query", "status_code", "message"),
    [
        ("limit=0", 400, "limit"),
        ("limit=1001", 400, "limit"),
        ("limit=many", 400, "limit"),
        ("after_id=msgbatch_x&before_id=msgbatch_x", 400, "only one"),
        ("after_id=msgbatch_x", 404, "'msgbatch_x'"),
        ("before_id=batch_x", 404, "'batch_x'"),
    ],
)
def test_a_list_with_a_bad_parameter_is_refused(
    bare_server: Server, query: str, status_code: int, message: str
) -> None:
    answer = bare_server.http.get(f"{PATH}?{query}")
    assert answer.status_code == status_code
    kind = "not_found_error" if status_code == 404 else "invalid_request_error"
    assert message in error_of(answer, kind)
