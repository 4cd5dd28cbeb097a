"""Batches, by every call that the client has for them, and the lines they give."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from contract_base import CHAT, Calls, but_for_cost, jsonl, refused, strictly
from openai import AsyncOpenAI
from openai.types import Batch, Completion, FileObject
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

DAY_S = 86_400
BAD_MESSAGES = {"messages": "not a list"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 4},
    "/v1/responses": {"input": "Once", "max_output_tokens": 4},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "Once"}],
        "max_tokens": 4,
    },
    "/v1/embeddings": {"input": "Once"},
    "/v1/score": {"query": "Once", "items": ["upon", "a time"], "label_token_ids": [1]},
    "/v1/rerank": {"query": "Once", "documents": ["upon", "a time"]},
    "/v1/classify": {"input": "Once"},
}


def a_batch_goes_from_beginning_to_end(calls: Calls) -> None:
    metadata = {"run": calls.name, "sch\u00f6n": "\u6f22" * 512}
    names = [f"{calls.name} {i}" for i in range(6)]
    lines = [calls.chat(name) for name in names]
    lines[2]["body"].update(BAD_MESSAGES)
    made = strictly(calls.start(lines, metadata=metadata))
    _is_new(made)
    assert made.metadata == metadata
    batch = calls.ended(made)
    assert batch.status == "completed", batch
    _in_order(batch)
    kept = ("id", "endpoint", "input_file_id", "completion_window", "metadata")
    for key in (*kept, "created_at", "expires_at"):
        assert getattr(batch, key) == getattr(made, key), key
    assert batch.model == calls.model and batch.errors is None
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (6, 5, 1)
    answers = calls.lines(batch.output_file_id)
    (error,) = calls.lines(batch.error_file_id)
    assert [a["custom_id"] for a in answers] == names[:2] + names[3:]
    _are_answers(answers, ChatCompletion)
    assert error["custom_id"] == names[2]
    _is_refused_line(error)
    assert len({line["id"] for line in (*answers, error)}) == 6
    _is_sum(batch, answers)


def _is_new(batch: Batch) -> None:
    assert (batch.object, batch.status) == ("batch", "validating")
    assert batch.id.startswith("batch_")
    assert (batch.endpoint, batch.completion_window) == (CHAT, "24h")
    assert batch.expires_at == batch.created_at + DAY_S
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (0, 0, 0)
    nulls = ("errors", "output_file_id", "error_file_id", "in_progress_at")
    for key in (*nulls, "finalizing_at", "completed_at", "failed_at", "cancelled_at"):
        assert getattr(batch, key) is None, key


def _in_order(batch: Batch) -> None:
    times = [
        batch.created_at,
        batch.in_progress_at,
        batch.finalizing_at,
        batch.completed_at,
    ]
    assert None not in times and times == sorted(times), times  # type: ignore[type-var]
    others = ("failed_at", "expired_at", "cancelling_at", "cancelled_at")
    assert [getattr(batch, key) for key in others] == [None] * 4


def _are_answers(lines: list[dict[str, Any]], kind: Any) -> None:
    for line in lines:
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert line["id"].startswith("batch_req_") and line["error"] is None
        response = line["response"]
        assert set(response) == {"status_code", "request_id", "body"}
        assert response["status_code"] == 200 and response["request_id"]
        kind.model_validate_json(json.dumps(response["body"]), strict=True)


def _is_refused_line(line: dict[str, Any]) -> None:
    # A line that equals another names it.
    assert set(line) - {"merged_with"} == {"id", "custom_id", "response", "error"}
    assert line["error"] is None
    assert set(line["response"]) == {"status_code", "request_id", "body"}
    assert 400 <= line["response"]["status_code"] < 500, line
    error = line["response"]["body"]["error"]
    assert set(error) >= {"message", "type", "param", "code"}, line
    assert error["message"]


def _is_sum(batch: Batch, answers: list[dict[str, Any]]) -> None:
    usages = [answer["response"]["body"]["usage"] for answer in answers]
    usage = batch.usage
    assert usage is not None
    assert usage.input_tokens == sum(u["prompt_tokens"] for u in usages) > 0
    assert usage.output_tokens == sum(u["completion_tokens"] for u in usages) > 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    choices = [c for answer in answers for c in answer["response"]["body"]["choices"]]
    truncated = sum(choice["finish_reason"] == "length" for choice in choices)
    assert usage.model_dump().get("truncated_answers", 0) == truncated


def results_are_files_of_their_own(calls: Calls) -> None:
    after = {"anchor": "created_at", "seconds": 7200}
    lines = [calls.chat("good"), calls.chat("bad", **BAD_MESSAGES)]
    batch = calls.ended(calls.start(lines, output_expires_after=after))
    for file_id in (batch.output_file_id, batch.error_file_id):
        assert file_id is not None
        file = strictly(calls.api.files.retrieve(file_id))
        assert file.purpose == "batch_output" and file.filename.endswith(".jsonl")
        assert file.expires_at == file.created_at + 7200
        assert file.bytes == len(calls.api.files.content(file_id).read())
        listed = calls.api.files.list(purpose="batch_output", limit=50)
        assert file_id in {file.id for file in listed}
    kept = calls.ended(calls.start([calls.chat("good")]))
    assert kept.error_file_id is None
    output = calls.api.files.retrieve(str(kept.output_file_id))
    assert output.expires_at == output.created_at + 30 * DAY_S
    assert calls.api.files.delete(output.id).deleted
    refused(lambda: calls.api.files.content(output.id), openai.NotFoundError)


def a_batch_whose_lines_all_fail_is_completed(calls: Calls) -> None:
    lines = [calls.chat(str(i), **BAD_MESSAGES) for i in range(9)]
    batch = calls.ended(calls.start(lines))
    assert (batch.status, batch.output_file_id) == ("completed", None)
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (9, 0, 9)
    for line in calls.lines(batch.error_file_id):
        _is_refused_line(line)


def batches_are_listed_page_by_page(calls: Calls) -> None:
    batches = calls.api.batches
    file_id = calls.upload(b"\n").id
    mine = [
        batches.create(
            input_file_id=file_id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"list": calls.name},
        ).id
        for _ in range(6)
    ]
    pages, found = [], []
    for page in batches.list(limit=2).iter_pages():
        pages.append(page)
        found += [strictly(batch) for batch in page.data]
        if mine[0] in {batch.id for batch in found}:
            break
    assert len(pages) >= 3
    assert all(len(page.data) == 2 and page.has_more for page in pages[:-1])
    assert len({batch.id for batch in found}) == len(found)
    assert [batch.id for batch in found if batch.id in mine] == mine[::-1]
    assert {b.id for b in found if b.metadata == {"list": calls.name}} == set(mine)
    after = batches.list(after=found[-1].id, limit=1).data
    assert not after or after[0].id not in {batch.id for batch in found}
    assert len(batches.list().data) <= 20
    refused(lambda: batches.list(limit=101), param="limit")
    refused(lambda: batches.list(limit=0), param="limit")
    refused(lambda: batches.list(after="batch_no"), openai.NotFoundError, param="after")


def a_cancelled_batch_keeps_what_is_finished(calls: Calls) -> None:
    # More than can run at a time, so that some are never run.
    lines = [calls.chat(str(i), max_tokens=100, ignore_eos=True) for i in range(800)]
    started = calls.start(lines)
    first = strictly(calls.api.batches.cancel(started.id))
    assert first.status == "cancelling" and first.cancelling_at is not None
    again = strictly(calls.api.batches.cancel(started.id))
    assert again.status in ("cancelling", "cancelled")
    assert again.cancelling_at == first.cancelling_at
    batch = calls.ended(again)
    assert batch.status == "cancelled" and batch.cancelled_at is not None
    assert (batch.completed_at, batch.failed_at, batch.expired_at) == (None,) * 3
    again = strictly(calls.api.batches.cancel(batch.id))
    assert but_for_cost(again) == but_for_cost(batch)
    done, unrun = calls.lines(batch.output_file_id), calls.lines(batch.error_file_id)
    _are_answers(done, ChatCompletion)
    _were_not_run(unrun, "batch_cancelled")
    _split_of(batch, done, unrun, lines)


def _were_not_run(lines: list[dict[str, Any]], code: str) -> None:
    for line in lines:
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert line["response"] is None
        assert set(line["error"]) == {"code", "message"}
        assert line["error"]["code"] == code and line["error"]["message"]


def _split_of(
    batch: Batch,
    done: list[dict[str, Any]],
    unrun: list[dict[str, Any]],
    lines: list[dict[str, Any]],
) -> None:
    """Each line once; those that never ran are not counted as failed."""
    ids = [line["custom_id"] for line in (*done, *unrun)]
    assert sorted(ids) == sorted(line["custom_id"] for line in lines)
    assert unrun
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed) == (len(lines), len(done))
    assert counts.failed == 0


def a_batch_expires_at_its_window(calls: Calls) -> None:
    lines = [calls.chat(str(i), max_tokens=150, ignore_eos=True) for i in range(800)]
    batch = calls.ended(calls.start(lines, completion_window="1s"))
    assert batch.status == "expired", batch
    assert batch.expires_at == batch.created_at + 1
    assert batch.expired_at is not None and batch.expired_at >= batch.expires_at
    done, unrun = calls.lines(batch.output_file_id), calls.lines(batch.error_file_id)
    _were_not_run(unrun, "batch_expired")
    _split_of(batch, done, unrun, lines)
    says = "Cannot cancel a batch with status 'expired'."
    refused(lambda: calls.api.batches.cancel(batch.id), openai.ConflictError, says=says)


def a_batch_may_have_a_priority(calls: Calls) -> None:
    batch = strictly(calls.start([calls.chat("a")], extra_body={"priority": 5}))
    assert calls.ended(batch).status == "completed"
    for priority in ("high", 1.5, True, [1]):
        body = {"priority": priority}
        refused(
            lambda body=body: calls.start([calls.chat("a")], extra_body=body),  # type: ignore[misc]
            param="priority",
        )


def a_repeated_call_with_a_key_makes_one_batch(calls: Calls) -> None:
    file_id = calls.upload([calls.chat("a")]).id

    def create(key: str, **fields: Any) -> Batch:
        return calls.api.batches.create(
            input_file_id=file_id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            extra_headers={"Idempotency-Key": f"{calls.name}-{key}"},
            **fields,
        )

    first = strictly(create("one"))
    assert strictly(create("one")).id == first.id
    assert create("two").id != first.id
    refused(
        lambda: create("one", metadata={"other": "x"}),
        openai.ConflictError,
        says="Idempotency-Key",
    )


def every_endpoint_answers_every_line(calls: Calls) -> None:
    """Those that the model cannot serve answer with an error line, not by failing."""
    kinds = {"/v1/completions": Completion, "/v1/responses": Response}
    started = {
        url: strictly(calls.start([calls.line(url, url, body)], url))
        for url, body in BODIES.items()
    }
    for url, batch in started.items():
        batch = calls.ended(batch)
        assert batch.status == "completed" and batch.endpoint == url, batch
        answers = calls.lines(batch.output_file_id)
        errors = calls.lines(batch.error_file_id)
        assert [line["custom_id"] for line in (*answers, *errors)] == [url]
        for error in errors:
            _is_refused_line(error)
        assert url == "/v1/embeddings" or answers or url not in kinds, errors
        if url in kinds:
            _are_answers(answers, kinds[url])


def the_async_client_does_the_same(calls: Calls) -> None:
    asyncio.run(_all_async(calls))


async def _all_async(calls: Calls) -> None:
    async with AsyncOpenAI(base_url=f"{calls.base_url}/v1", api_key="none") as api:
        content = jsonl([calls.chat("async")])
        files = [
            await api.files.create(file=("a.jsonl", content), purpose="assistants")
            for _ in range(3)
        ]
        listed = api.files.list(purpose="assistants", limit=1)
        found: list[FileObject] = [strictly(file) async for file in listed]
        assert {file.id for file in files} <= {file.id for file in found}
        assert strictly(await api.files.wait_for_processing(files[0].id)) == files[0]
        assert (await api.files.content(files[0].id)).text == content.decode()
        async with api.files.with_streaming_response.content(files[0].id) as streamed:
            assert b"".join([c async for c in streamed.iter_bytes()]) == content
        for file in files:
            assert strictly(await api.files.delete(file.id)).deleted
        source = await api.files.create(file=("a.jsonl", content), purpose="batch")
        batch = await api.batches.create(
            input_file_id=source.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )
        async for listed_batch in api.batches.list(limit=1):
            strictly(listed_batch)
            if listed_batch.id == batch.id:
                break
        while (batch := strictly(await api.batches.retrieve(batch.id))).status in (
            "validating",
            "in_progress",
            "finalizing",
        ):
            await asyncio.sleep(0.1)
        assert batch.status == "completed", batch
        try:
            await api.batches.cancel(batch.id)
        except openai.ConflictError as error:
            assert error.response.headers["x-should-retry"] == "false"
        else:
            raise AssertionError("a completed batch was cancelled")


CHECKS = (
    a_cancelled_batch_keeps_what_is_finished,
    a_batch_expires_at_its_window,
    a_batch_goes_from_beginning_to_end,
    results_are_files_of_their_own,
    a_batch_whose_lines_all_fail_is_completed,
    batches_are_listed_page_by_page,
    a_batch_may_have_a_priority,
    a_repeated_call_with_a_key_makes_one_batch,
    every_endpoint_answers_every_line,
    the_async_client_does_the_same,
)
