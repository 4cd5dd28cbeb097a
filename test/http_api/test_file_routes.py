"""Files over HTTP."""

from __future__ import annotations

import io

import openai
import pytest
from builders import make_line
from openai.types import FileObject
from route_server import Server, error_of

from sglang_batch.batch_api.protocol import FILE_PURPOSES


def test_an_uploaded_file_is_processed_at_once(server: Server) -> None:
    line = f"{make_line()}\n".encode()
    file = server.client.files.create(file=("in.jsonl", line), purpose="batch")
    assert file.id.startswith("file-")
    assert file.bytes == len(line)
    assert (file.object, file.purpose, file.status) == ("file", "batch", "processed")
    assert file.filename == "in.jsonl"
    waited = server.client.files.wait_for_processing(file.id, max_wait_seconds=0)
    assert waited == file == server.client.files.retrieve(file.id)


def test_content_is_the_bytes_that_were_uploaded(server: Server) -> None:
    data = b"\xef\xbb\xbf\r\n\xff not even text \0"
    file = server.client.files.create(file=("in.jsonl", data), purpose="batch")
    assert server.client.files.content(file.id).read() == data


@pytest.mark.parametrize(
    "asked", ["bytes=5-2", "bytes=", "bytes", "bytes=a-b", "lines=0-1", "bytes=0--5"]
)
def test_a_range_that_is_none_is_ignored(server: Server, asked: str) -> None:
    path = f"/v1/files/{server.upload(make_line())}/content"
    answer = server.http.get(path, headers={"range": asked})
    assert answer.status_code == 200
    assert answer.content == server.http.get(path).content


def test_a_part_of_a_file(server: Server) -> None:
    path = f"/v1/files/{server.upload(make_line())}/content"
    whole = server.http.get(path).content
    part = server.http.get(path, headers={"range": "bytes=2-5"})
    assert (part.status_code, part.content) == (206, whole[2:6])
    assert server.http.get(path, headers={"range": "bytes=9999-"}).status_code == 416


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
    assert file.expires_at - file.created_at == 3600


@pytest.mark.parametrize("seconds", ["3599", "2592001", "-1", "1e4", "soon"])
def test_an_expiry_out_of_range_is_refused(bare_server: Server, seconds: str) -> None:
    answer = bare_server.http.post(
        "/v1/files",
        data={"purpose": "batch", "expires_after[seconds]": seconds},
        files={"file": ("in.jsonl", b"x")},
    )
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "expires_after.seconds"


@pytest.mark.slow
def test_a_deleted_file_is_gone(server: Server) -> None:
    file_id = server.upload()
    deleted = server.client.files.delete(file_id)
    assert (deleted.id, deleted.deleted, deleted.object) == (file_id, True, "file")
    for call in (server.client.files.retrieve, server.client.files.content):
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
    code = "invalid_value" if data else "missing_required_parameter"
    assert (error["param"], error["code"]) == ("purpose", code)


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


@pytest.mark.parametrize("query", ["", "?limit=1"])
def test_a_redirect_stays_on_the_server(bare_server: Server, query: str) -> None:
    answer = bare_server.http.get(
        f"/v1/files/{query}", headers={"host": "evil.example"}, follow_redirects=False
    )
    assert answer.status_code == 307
    assert answer.headers["location"] == f"/v1/files{query}"
