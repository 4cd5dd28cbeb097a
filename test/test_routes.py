"""The HTTP API, driven by the official client and, where it would not, by hand."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from builders import (
    CHAT,
    MODEL,
    FakeEngine,
    answer_text,
    make_body,
    make_line,
    make_lines,
    parse_lines,
    running_service,
)
from fastapi import FastAPI
from fastapi.testclient import TestClient
from openai import OpenAI
from openai.types import Batch, FileObject

from sglang_batch import runner as runner_module
from sglang_batch.batch_api.protocol import FILE_PURPOSES
from sglang_batch.engine import WAVE_PATH
from sglang_batch.routes import router
from sglang_batch.service import BatchService

ENDED = ("completed", "failed", "cancelled", "expired")


class AppTransport(httpx.BaseTransport):
    """Carries the official client's requests to an application in this process."""

    def __init__(self, client: TestClient) -> None:
        self._client = client

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._client.request(
            request.method,
            str(request.url),
            content=request.read(),
            headers=list(request.headers.multi_items()),
        )
        return httpx.Response(
            answer.status_code,
            headers=list(answer.headers.multi_items()),
            content=answer.content,
        )


class Server:
    """An application with our routes, and two ways to call it.

    http: requests as they are.
    client: the official client; it does not repeat what fails.
    """

    def __init__(self, http: TestClient, app: FastAPI, engine: FakeEngine) -> None:
        self.http = http
        self.engine = engine
        self.service: BatchService = app.state.offline_batch_service
        self.client = OpenAI(
            api_key="none",
            base_url="http://testserver/v1",
            max_retries=0,
            http_client=httpx.Client(transport=AppTransport(http)),
        )

    def upload(self, *lines: str, purpose: Any = "batch") -> str:
        data = "".join(f"{line}\n" for line in lines or [make_line()]).encode()
        return self.client.files.create(file=("in.jsonl", data), purpose=purpose).id

    def start(self, *lines: str, **fields: Any) -> Batch:
        return self.client.batches.create(
            **{
                "input_file_id": self.upload(*lines),
                "endpoint": CHAT,
                "completion_window": "24h",
                **fields,
            }
        )

    def ended(self, batch: Batch) -> Batch:
        """The batch at its end, which clients wait for by asking again."""
        while batch.status not in ENDED:
            batch = self.client.batches.retrieve(batch.id)
        return batch

    def call(self, function: Any, *args: Any) -> Any:
        """Call something on the server's event loop."""
        assert self.http.portal is not None
        return self.http.portal.call(function, *args)


@contextmanager
def serving(directory: Path) -> Iterator[Server]:
    engine = FakeEngine(failing={"fails": 400})

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running_service(directory, engine, policy="fcfs") as service:
            app.state.offline_batch_service = service
            yield

    app = FastAPI(lifespan=lifespan)
    app.include_router(router)
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        TestClient(app, raise_server_exceptions=False) as http,
    ):
        monkeypatch.setattr(runner_module, "POLL_S", 0.002)
        yield Server(http, app, engine)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of the test's own, with nothing in it."""
    with serving(tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def bare_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all the tests that are refused everything: nothing gets into it."""
    with serving(tmp_path_factory.mktemp("bare")) as server:
        yield server
        for path in ("/v1/files", "/v1/batches"):
            assert server.http.get(path).json()["data"] == []


def error_of(answer: Any) -> dict[str, Any]:
    """The error of an answer, whose body must be OpenAI's nested one."""
    body: dict[str, Any] = answer.json()
    assert list(body) == ["error"], body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    kind = "invalid_request_error" if answer.status_code < 500 else "server_error"
    assert body["error"]["type"] == kind
    error: dict[str, Any] = body["error"]
    return error


# Files --------------------------------------------------------------------------


def test_an_uploaded_file_is_processed_at_once(server: Server) -> None:
    line = f"{make_line()}\n".encode()
    file = server.client.files.create(file=("in.jsonl", line), purpose="batch")
    assert file.id.startswith("file-")
    assert file.bytes == len(line)
    assert (file.object, file.purpose, file.status) == ("file", "batch", "processed")
    assert (file.filename, file.expires_at) == ("in.jsonl", None)
    waited = server.client.files.wait_for_processing(file.id, max_wait_seconds=0)
    assert waited == file == server.client.files.retrieve(file.id)


def test_content_is_the_bytes_that_were_uploaded(server: Server) -> None:
    data = b"\xef\xbb\xbf\r\n\xff not even text \0"
    file = server.client.files.create(file=("in.jsonl", data), purpose="batch")
    assert server.client.files.content(file.id).read() == data


def test_an_upload_from_memory_needs_no_suffix(server: Server) -> None:
    file = server.client.files.create(
        file=io.BytesIO(make_line().encode()), purpose="batch"
    )
    assert file.filename == "upload"


def test_a_purpose_that_is_not_batch_takes_any_suffix(server: Server) -> None:
    file = server.client.files.create(file=("x.pdf", b"x"), purpose="user_data")
    assert (file.filename, file.purpose) == ("x.pdf", "user_data")


@pytest.mark.parametrize("purpose", FILE_PURPOSES)
def test_a_file_of_any_purpose_is_shown_and_listed(
    server: Server, purpose: str
) -> None:
    file_id = server.upload(purpose=purpose)
    file = server.client.files.retrieve(file_id)
    assert file.purpose == purpose
    assert [listed.id for listed in server.client.files.list()] == [file_id]
    assert set(server.http.get(f"/v1/files/{file_id}").json()) == set(
        FileObject.model_fields
    )


def test_an_upload_may_say_when_it_expires(server: Server) -> None:
    file = server.client.files.create(
        file=("in.jsonl", b"x"),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.expires_at is not None
    assert 3600 <= file.expires_at - file.created_at <= 3601


@pytest.mark.parametrize("seconds", ["3599", "2592001", "-1", "1e4", "soon"])
def test_an_expiry_out_of_range_is_refused(bare_server: Server, seconds: str) -> None:
    answer = bare_server.http.post(
        "/v1/files",
        data={"purpose": "batch", "expires_after[seconds]": seconds},
        files={"file": ("in.jsonl", b"x")},
    )
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "expires_after.seconds"


def test_a_deleted_file_is_gone(server: Server) -> None:
    file_id = server.upload()
    deleted = server.client.files.delete(file_id)
    assert (deleted.id, deleted.deleted, deleted.object) == (file_id, True, "file")
    for call in (
        server.client.files.retrieve,
        server.client.files.content,
        server.client.files.delete,
    ):
        with pytest.raises(openai.NotFoundError):
            call(file_id)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/files/file-none"),
        ("GET", "/v1/files/file-none/content"),
        ("DELETE", "/v1/files/file-none"),
        ("GET", "/v1/files/..%2Fbatches.sqlite3/content"),
    ],
)
def test_an_unknown_file_is_not_found(
    bare_server: Server, method: str, path: str
) -> None:
    answer = bare_server.http.request(method, path)
    assert answer.status_code == 404
    if "%2F" not in path:  # else it is no path of ours at all
        assert error_of(answer) == {
            "message": "No such File object: file-none",
            "type": "invalid_request_error",
            "param": "id",
            "code": None,
        }


def test_an_upload_of_another_format_is_refused(bare_server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        bare_server.client.files.create(file=("in.csv", b"a,b"), purpose="batch")
    assert raised.value.body == {
        "message": "Invalid file format for Batch API. Must be .jsonl",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


@pytest.mark.parametrize("data", [{}, {"purpose": "batch_output"}, {"purpose": "x"}])
def test_an_upload_needs_a_purpose_that_is_known(
    bare_server: Server, data: dict[str, str]
) -> None:
    answer = bare_server.http.post(
        "/v1/files", data=data, files={"file": ("in.jsonl", b"x")}
    )
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["param"], error["code"]) == ("purpose", "invalid_value")


@pytest.mark.parametrize("data", [{}, {"file": "text, not a file"}])
def test_an_upload_needs_a_file(bare_server: Server, data: dict[str, str]) -> None:
    answer = bare_server.http.post("/v1/files", data={"purpose": "batch", **data})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "file"


def test_an_upload_that_is_no_form_is_refused(bare_server: Server) -> None:
    answer = bare_server.http.post(
        "/v1/files", content=b"x", headers={"content-type": "multipart/form-data"}
    )
    assert answer.status_code == 400
    assert "boundary" in error_of(answer)["message"]


# Lists ----------------------------------------------------------------------------


def test_files_are_listed_newest_first_over_pages(server: Server) -> None:
    ids = [server.upload() for _ in range(5)]
    page = server.client.files.list(limit=2)
    assert [file.id for file in page.data] == ids[:2:-1]
    assert page.has_more
    assert [file.id for file in page] == ids[::-1]  # the client asks for the rest


def test_files_are_listed_oldest_first_and_by_purpose(server: Server) -> None:
    ids = [server.upload(purpose=p) for p in ("batch", "evals", "batch", "evals")]
    page = server.client.files.list(order="asc", limit=1, purpose="evals")
    assert [file.id for file in page] == [ids[1], ids[3]]


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_a_page_says_whether_there_is_more(server: Server, path: str) -> None:
    empty: dict[str, Any] = {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
    }
    assert server.http.get(path).json() == {**empty, "has_more": False}
    for _ in range(4):
        server.start()
    pages, after = [], ""
    for _ in range(2):
        page = server.http.get(f"{path}?limit=2{after}").json()
        assert page["object"] == "list"
        assert [page["first_id"], page["last_id"]] == [x["id"] for x in page["data"]]
        after = f"&after={page['last_id']}"
        pages.append(page)
    assert pages[0]["has_more"]
    if path == "/v1/batches":  # of files there are results too
        assert not pages[1]["has_more"]
        assert server.http.get(f"{path}?limit=2{after}").json()["data"] == []


def test_batches_are_listed_newest_first_over_pages(server: Server) -> None:
    ids = [server.start().id for _ in range(5)]
    page = server.client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == ids[:2:-1]
    assert [batch.id for batch in page] == ids[::-1]
    assert [batch.id for batch in server.client.batches.list()] == ids[::-1]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/files?limit=0", "limit"),
        ("/v1/files?limit=10001", "limit"),
        ("/v1/files?limit=many", "limit"),
        ("/v1/files?order=sideways", "order"),
        ("/v1/batches?limit=0", "limit"),
        ("/v1/batches?limit=101", "limit"),
        ("/v1/batches?limit=-1", "limit"),
        ("/v1/batches?limit=1.5", "limit"),
    ],
)
def test_a_parameter_of_a_list_out_of_range_is_refused(
    bare_server: Server, path: str, param: str
) -> None:
    answer = bare_server.http.get(path)
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_a_page_after_something_unknown_is_not_found(
    bare_server: Server, path: str
) -> None:
    answer = bare_server.http.get(f"{path}?after=nothing")
    assert answer.status_code == 404
    assert error_of(answer)["param"] == "after"


# Batches --------------------------------------------------------------------------

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
    assert batch.usage.model_dump() == {
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


# What a batch cannot be made of -----------------------------------------------------

DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"text"', b'{"a": "\xff"}', b'{"a": "\\ud800"}', DEEP]
)
@pytest.mark.parametrize("path", ["/v1/batches", WAVE_PATH])
def test_a_body_that_is_no_json_object_is_refused(
    bare_server: Server, path: str, body: bytes
) -> None:
    answer = bare_server.http.post(path, content=body)
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["param"], error["code"]) == (None, None)


CREATE = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}


def refused(server: Server, fields: dict[str, Any]) -> dict[str, Any]:
    """The error of a batch with these fields; it must not have been made."""
    answer = server.http.post("/v1/batches", json=fields)
    assert answer.status_code == 400
    assert server.http.get("/v1/batches").json()["data"] == []
    return error_of(answer)


@pytest.mark.parametrize("key", CREATE)
@pytest.mark.parametrize("null", [False, True])
def test_a_missing_key_is_named(bare_server: Server, key: str, null: bool) -> None:
    fields: dict[str, Any] = {k: v for k, v in CREATE.items() if k != key}
    assert refused(bare_server, {**fields, key: None} if null else fields) == {
        "message": f"Missing required parameter: '{key}'.",
        "type": "invalid_request_error",
        "param": key,
        "code": "missing_required_parameter",
    }


@pytest.mark.parametrize("key", CREATE)
@pytest.mark.parametrize("value", [1, [], {}, True])
def test_a_key_of_another_type_is_named(
    bare_server: Server, key: str, value: Any
) -> None:
    error = refused(bare_server, {**CREATE, key: value})
    assert (error["param"], error["code"]) == (key, "invalid_type")


@pytest.mark.parametrize(
    ("key", "value", "supported"),
    [
        (
            "endpoint",
            "/v1/magic",
            "'/v1/chat/completions', '/v1/completions', '/v1/embeddings'",
        ),
        ("completion_window", "1h", "'24h'"),
    ],
)
def test_a_value_that_is_not_supported_is_named_with_those_that_are(
    bare_server: Server, key: str, value: str, supported: str
) -> None:
    assert refused(bare_server, {**CREATE, key: value}) == {
        "message": f"Invalid value: '{value}'. Supported values are: {supported}.",
        "type": "invalid_request_error",
        "param": key,
        "code": "invalid_value",
    }


@pytest.mark.parametrize(
    ("metadata", "param", "code"),
    [
        ("text", "metadata", "invalid_type"),
        (["a"], "metadata", "invalid_type"),
        ({f"k{i}": "v" for i in range(17)}, "metadata", "invalid_value"),
        ({"k" * 65: "v"}, f"metadata.{'k' * 65}", "invalid_value"),
        ({"k": "v" * 513}, "metadata.k", "invalid_value"),
        ({"k": 1}, "metadata.k", "invalid_type"),
        ({"k": None}, "metadata.k", "invalid_type"),
        ({"tags": {"a": "b"}}, "metadata.tags", "invalid_type"),
    ],
)
def test_metadata_that_cannot_be_kept_is_named(
    bare_server: Server, metadata: Any, param: str, code: str
) -> None:
    error = refused(bare_server, {**CREATE, "metadata": metadata})
    assert (error["param"], error["code"]) == (param, code)


def test_metadata_of_a_wrong_type_is_refused_in_openais_words(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        server.start(metadata={"tags": ["a"]})
    error = raised.value
    assert (error.param, error.code) == ("metadata.tags", "invalid_type")
    assert isinstance(error.body, dict)
    assert error.body["message"] == (
        "Invalid type for 'metadata.tags': expected a string, but got an array instead."
    )


@pytest.mark.parametrize(
    "metadata",
    [None, {}, {"k" * 64: "v" * 512}, {f"k{i}": "" for i in range(16)}, {"\u00e9": "\u2028"}],
)  # fmt: skip
def test_metadata_within_the_limits_comes_back(server: Server, metadata: Any) -> None:
    batch = server.start(metadata=metadata)
    assert server.client.batches.retrieve(batch.id).metadata == metadata


def test_a_file_of_another_purpose_is_refused(server: Server) -> None:
    file_id = server.upload(purpose="user_data")
    error = refused(server, {**CREATE, "input_file_id": file_id})
    assert error["param"] == "input_file_id"
    assert "'user_data'" in error["message"]


def test_keys_that_are_not_known_are_ignored(server: Server) -> None:
    batch = server.start(extra_body={"priority": 5})
    assert server.ended(batch).status == "completed"


def test_an_error_nobody_expected_has_the_same_body(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(batch_id: str) -> None:
        raise OSError("disk I/O error")

    monkeypatch.setattr(server.service.store, "get_batch", broken)
    answer = server.http.get("/v1/batches/batch_1")
    assert answer.status_code == 500
    assert "disk" not in error_of(answer)["message"]  # that is for the log


# Waves ------------------------------------------------------------------------------


def test_a_wave_answers_each_request_by_its_index(server: Server) -> None:
    bodies = [{"text": f"prompt {i}"} for i in range(3)]
    answer = server.http.post(WAVE_PATH, json={"requests": bodies})
    assert answer.status_code == 200
    lines = sorted(parse_lines(answer.content), key=lambda line: line["index"])
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert [line["status_code"] for line in lines] == [200] * 3
    texts = [line["body"]["choices"][0]["message"]["content"] for line in lines]
    assert texts == [body["text"] for body in bodies]


def test_an_empty_wave_has_no_answers(bare_server: Server) -> None:
    answer = bare_server.http.post(WAVE_PATH, json={"requests": []})
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("body", [{}, {"requests": {}}, {"requests": [1]}])
def test_a_wave_that_is_no_list_of_objects_is_refused(
    bare_server: Server, body: dict[str, Any]
) -> None:
    answer = bare_server.http.post(WAVE_PATH, content=json.dumps(body))
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "requests"
