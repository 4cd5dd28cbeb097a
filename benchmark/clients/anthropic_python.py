"""Anthropic's client for Python."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import anthropic
import checks as c
from anthropic.types import RawMessageStreamEvent
from checks import check, same, strict

TOOL: Any = {"tools": [{"name": "weather", "input_schema": c.SCHEMA}]}
TOOL |= {"tool_choice": {"type": "any"}}


def client(key: str = c.KEY) -> Any:
    return anthropic.Anthropic(base_url=c.URL, api_key=key, max_retries=0, timeout=120)


api = client().messages
asked: Any = {"model": c.MODEL, "messages": c.ASK, "max_tokens": 90}


def ask(key: str = c.KEY, **more: Any) -> Any:
    # The client has no parameter for what is not Claude's own.
    extra = {"extra_body": {k: more.pop(k) for k in ("temperature",) if k in more}}
    return client(key).messages.create(**asked | more, **extra)


def start(bodies: dict[str, Any]) -> Any:
    requests = [{"custom_id": k, "params": asked | v} for k, v in bodies.items()]
    return same(api.batches.create(requests=requests))


def ended(batch: Any) -> Any:
    def fetch() -> Any:
        found = same(api.batches.retrieve(batch.id))
        return SimpleNamespace(status=found.processing_status, batch=found)

    return c.ended(fetch, ["ended"]).batch


@check("models")
def _() -> None:
    assert [same(each).id for each in client().models.list()] == [c.MODEL]


@check("messages")
def _() -> None:
    assert same(ask(system="Be short.")).usage.output_tokens > 0
    assert api.count_tokens(model=c.MODEL, messages=c.ASK).input_tokens > 0


@check("stream")
def _() -> None:
    events = [
        strict(RawMessageStreamEvent, event.to_json()).type
        for event in ask(stream=True)
    ]
    assert (events[0], events[-1]) == ("message_start", "message_stop"), events
    with api.stream(**asked) as stream:
        assert stream.get_final_message().usage.output_tokens > 0


@check("tools")
def _() -> None:
    content = same(ask(**TOOL)).content
    [call] = [block for block in content if block.type == "tool_use"]
    c.Place.model_validate(call.input)
    told = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
    turns = (
        {"role": "assistant", "content": content},
        {"role": "user", "content": [told]},
    )
    same(ask(messages=[*c.ASK, *turns]))


@check("schema")
def _() -> None:
    answer = api.parse(**asked, output_format=c.Place)
    assert isinstance(answer.parsed_output, c.Place), answer


@check("message batches")
def _() -> None:
    found = ended(start({"plain": {}, "tool": TOOL, "refused": {"top_p": 7}}))
    counts = found.request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (2, 1, 0), found
    results = [same(each) for each in api.batches.results(found.id)]
    assert [each.custom_id for each in results] == ["plain", "tool", "refused"]
    assert results[2].result.error.error.type == "invalid_request_error", results[2]
    assert same(api.batches.delete(found.id)).id == found.id
    c.refused(anthropic.BadRequestError, lambda: start({"no id": {}}), "no id")


@check("cancel")
def _() -> None:
    made = start({f"long-{i}": {"max_tokens": 900} for i in range(40)})
    found = ended(same(api.batches.cancel(made.id)))
    assert found.request_counts.canceled > 0, found


@check("paging")
def _() -> None:
    made = [start({"plain": {}}).id for _ in range(3)]
    ids = [same(each).id for each in api.batches.list(limit=2)]
    assert ids[:3] == made[::-1] and len(set(ids)) == len(ids), (made, ids)


@check("unknown batch")
def _() -> None:
    for call in (api.batches.retrieve, api.batches.cancel):
        c.refused(anthropic.NotFoundError, partial(call, "batch_x"), "batch_x")


c.check_errors(
    ask,
    anthropic.BadRequestError,
    anthropic.AuthenticationError,
    anthropic.NotFoundError,
)
c.report("anthropic")
