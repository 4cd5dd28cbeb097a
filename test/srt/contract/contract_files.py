"""Files and uploads, by every call that the client has for them."""

from __future__ import annotations

import hashlib
import io
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
from contract_base import Calls, jsonl, refused, strictly
from openai.types import FileObject

DAY_S = 86_400
CONTENT = b'{"a": 1}\n{"b": "\xc3\xa9\xe2\x80\xa8"}\n{"c": 3}\n'
LINES = CONTENT.decode().split("\n")[:-1]


def a_file_comes_back_as_it_was_sent(calls: Calls) -> None:
    files = calls.api.files
    file = strictly(calls.upload(CONTENT))
    assert (file.object, file.bytes) == ("file", len(CONTENT))
    assert (file.purpose, file.status) == ("batch", "processed")
    assert file.filename == f"{calls.name}.jsonl"
    assert strictly(files.retrieve(file.id)) == file
    content = files.content(file.id)
    assert content.read() == CONTENT
    assert content.text == CONTENT.decode()
    assert b"".join(files.content(file.id).iter_bytes()) == CONTENT
    # The client's own splitting takes U+2028 for the end of a line too.
    assert list(files.content(file.id).iter_lines()) == CONTENT.decode().splitlines()
    with files.with_streaming_response.content(file.id) as streamed:
        assert b"".join(streamed.iter_bytes(7)) == CONTENT
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "copy")
        files.content(file.id).write_to_file(copy)
        assert copy.read_bytes() == CONTENT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert files.retrieve_content(file.id) == CONTENT.decode()


def a_file_need_not_be_waited_for(calls: Calls) -> None:
    file = calls.upload(CONTENT)
    began = time.monotonic()
    assert strictly(calls.api.files.wait_for_processing(file.id)) == file
    assert time.monotonic() - began < 3


def a_file_may_come_in_many_ways(calls: Calls) -> None:
    create = calls.api.files.create
    unnamed = strictly(create(file=io.BytesIO(CONTENT), purpose="batch"))
    assert unnamed.filename == "upload"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "named.jsonl")
        path.write_bytes(CONTENT)
        assert strictly(create(file=path, purpose="batch")).filename == path.name
        with path.open("rb") as opened:
            assert strictly(create(file=opened, purpose="batch")).bytes == len(CONTENT)
    odd = "sch\u00f6n \u6f22.jsonl"
    assert strictly(create(file=(odd, CONTENT), purpose="batch")).filename == odd
    # Lines without a method are the batch's business, not the upload's.
    assert strictly(calls.upload([{"custom_id": "a"}])).status == "processed"


def files_expire_when_they_are_told_to(calls: Calls) -> None:
    def lifetime(file: FileObject) -> int | None:
        strictly(file)
        return None if file.expires_at is None else file.expires_at - file.created_at

    create = calls.api.files.create
    named = (f"{calls.name}.jsonl", CONTENT)
    assert lifetime(create(file=named, purpose="batch")) == 30 * DAY_S
    assert lifetime(create(file=named, purpose="user_data")) is None
    for seconds in (3600, 30 * DAY_S):
        file = create(
            file=named,
            purpose="user_data",
            expires_after={"anchor": "created_at", "seconds": seconds},
        )
        assert lifetime(file) == seconds
    for seconds in (3599, 30 * DAY_S + 1):
        refused(
            lambda seconds=seconds: create(  # type: ignore[misc]
                file=named,
                purpose="batch",
                expires_after={"anchor": "created_at", "seconds": seconds},
            ),
            says="expires_after",
        )


def files_are_listed_page_by_page(calls: Calls) -> None:
    mine = [calls.upload(CONTENT, "vision").id for _ in range(5)]
    files = calls.api.files
    for order in ("asc", "desc"):
        first = files.list(purpose="vision", limit=2, order=order)
        pages = list(first.iter_pages())
        assert len(pages) >= 3
        assert [page.has_more for page in pages[:-1]] == [True] * (len(pages) - 1)
        assert pages[-1].has_more is False
        assert all(len(page.data) == 2 for page in pages[:-1])
        found = [strictly(file).id for page in pages for file in page.data]
        assert len(set(found)) == len(found)
        expected = mine if order == "asc" else mine[::-1]
        assert [i for i in found if i in mine] == expected
    assert {file.purpose for file in files.list(purpose="vision")} == {"vision"}
    newest = files.list().data  # newest first, if nothing else is said
    assert [f.id for f in newest if f.id in mine] == mine[::-1]
    for file_id in mine:
        files.delete(file_id)
    assert not set(mine) & {file.id for file in files.list(purpose="vision")}
    refused(lambda: files.list(limit=0), param="limit")
    refused(lambda: files.list(limit=10_001), param="limit")


def a_deleted_file_is_gone(calls: Calls) -> None:
    files = calls.api.files
    file = calls.upload(CONTENT)
    for _ in range(2):  # a client repeats the call if its answer was lost
        deleted = strictly(files.delete(file.id))
        assert (deleted.id, deleted.object, deleted.deleted) == (file.id, "file", True)
    for call in (files.retrieve, files.content):
        refused(
            lambda call=call: call(file.id),  # type: ignore[misc]
            openai.NotFoundError,
            param="id",
            code=None,
            says=f"No such File object: {file.id}",
        )


def a_file_that_is_none_is_refused(calls: Calls) -> None:
    create = calls.api.files.create
    holiday: Any = "holiday"
    refused(
        lambda: create(file=("a.jsonl", CONTENT), purpose=holiday),
        param="purpose",
        code="invalid_value",
    )
    refused(
        lambda: create(file=("a.txt", CONTENT), purpose="batch"),
        param=None,
        code=None,
        says="Invalid file format for Batch API. Must be .jsonl",
    )


def every_answer_has_a_request_id(calls: Calls) -> None:
    raw = calls.api.files.with_raw_response.create(
        file=("a.jsonl", CONTENT), purpose="batch"
    )
    assert raw.status_code == 200
    assert raw.headers["content-type"].startswith("application/json")
    assert raw.headers["x-request-id"]
    file = raw.parse()
    assert file._request_id == raw.headers["x-request-id"]
    again = calls.api.files.with_raw_response.retrieve(file.id)
    assert again.headers["x-request-id"] not in ("", raw.headers["x-request-id"])
    error = refused(lambda: calls.api.files.retrieve("file-x"), openai.NotFoundError)
    assert error.request_id


def an_upload_in_three_parts_is_one_file(calls: Calls) -> None:
    uploads = calls.api.uploads
    content = jsonl([calls.chat(f"part {i}") for i in range(3)])
    cuts = [0, 100, 250, len(content)]
    pieces = [content[a:b] for a, b in pairwise(cuts)]
    upload = strictly(
        uploads.create(
            bytes=len(content),
            filename=f"{calls.name}.jsonl",
            mime_type="application/jsonl",
            purpose="batch",
        )
    )
    assert (upload.object, upload.status) == ("upload", "pending")
    assert (upload.bytes, upload.file) == (len(content), None)
    assert upload.expires_at - upload.created_at == 3600
    parts: dict[int, str] = {}
    for i in (2, 0, 1):  # parts may come in any order
        part = strictly(uploads.parts.create(upload.id, data=pieces[i]))
        assert (part.object, part.upload_id) == ("upload.part", upload.id)
        parts[i] = part.id
    done = strictly(
        uploads.complete(
            upload.id,
            part_ids=[parts[i] for i in range(3)],
            md5=hashlib.md5(content).hexdigest(),
        )
    )
    assert (done.id, done.status) == (upload.id, "completed")
    assert done.file is not None
    assert (done.file.bytes, done.file.purpose) == (len(content), "batch")
    assert strictly(calls.api.files.retrieve(done.file.id)) == done.file
    assert calls.api.files.content(done.file.id).read() == content
    batch = calls.api.batches.create(
        input_file_id=done.file.id, endpoint="/v1/chat/completions",
        completion_window="24h",
    )  # fmt: skip
    batch = calls.ended(batch)
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 3, batch


def a_file_is_uploaded_in_chunks(calls: Calls) -> None:
    uploads = calls.api.uploads
    kinds: Any = {"mime_type": "application/jsonl", "purpose": "batch", "part_size": 16}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, f"{calls.name}.jsonl")
        path.write_bytes(CONTENT)
        done = strictly(uploads.upload_file_chunked(file=path, **kinds))
    assert done.status == "completed" and done.file is not None
    assert calls.api.files.content(done.file.id).read() == CONTENT
    done = uploads.upload_file_chunked(
        file=CONTENT, filename="memory.jsonl", bytes=len(CONTENT), **kinds
    )
    assert done.file is not None and done.file.filename == "memory.jsonl"


def an_upload_that_does_not_fit_together_is_refused(calls: Calls) -> None:
    uploads = calls.api.uploads

    def begun(size: int) -> str:
        return uploads.create(
            bytes=size, filename="a.jsonl", mime_type="text/plain", purpose="batch"
        ).id

    short = begun(len(CONTENT) + 1)
    part = uploads.parts.create(short, data=CONTENT).id
    refused(lambda: uploads.complete(short, part_ids=[part]), says="bytes")
    exact = begun(len(CONTENT))
    part = uploads.parts.create(exact, data=CONTENT).id
    refused(lambda: uploads.complete(exact, part_ids=["part_nope"]), says="part_nope")
    refused(lambda: uploads.complete(exact, part_ids=[part], md5="0" * 32), says="md5")
    for _ in range(2):  # a client repeats the call if its answer was lost
        cancelled = strictly(uploads.cancel(exact))
        assert cancelled.status == "cancelled"
    for call in (
        lambda: uploads.parts.create(exact, data=b"x"),
        lambda: uploads.complete(exact, part_ids=[part]),
    ):
        refused(call, openai.ConflictError, says="cancelled")
    for call in (
        lambda: uploads.cancel("upload_nope"),
        lambda: uploads.complete("upload_nope", part_ids=[]),
        lambda: uploads.parts.create("upload_nope", data=b"x"),
    ):
        refused(call, openai.NotFoundError, says="upload_nope")


CHECKS = (
    a_file_comes_back_as_it_was_sent,
    a_file_need_not_be_waited_for,
    a_file_may_come_in_many_ways,
    files_expire_when_they_are_told_to,
    files_are_listed_page_by_page,
    a_deleted_file_is_gone,
    a_file_that_is_none_is_refused,
    every_answer_has_a_request_id,
    an_upload_in_three_parts_is_one_file,
    a_file_is_uploaded_in_chunks,
    an_upload_that_does_not_fit_together_is_refused,
)
