"""OpenAI's client for Python, of any major version."""

from __future__ import annotations

from typing import Any

import checks as c
import openai
from checks import check, same, strict
from openai.types.responses import Response, ResponseStreamEvent


def client(url: str = c.URL, key: str = c.KEY) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)


RESPONSES = "/v1/responses"
api = client()
asked: Any = {"model": c.MODEL, **c.ASKED}


def start(content: bytes, url: str = c.CHAT) -> str:
    file = same(api.files.create(file=("in.jsonl", content), purpose="batch"))
    of = {"input_file_id": file.id, "completion_window": "24h"}
    return str(same(api.batches.create(**of, endpoint=url)).id)


def fetch(batch: str) -> Any:
    return same(api.batches.retrieve(batch))


def content(file: str) -> bytes:
    found: bytes = api.files.content(file).content
    return found


def listed() -> list[str]:
    files = [same(each).id for each in api.files.list(limit=2)]
    assert len(set(files)) == len(files) >= 3, files
    return [same(each).id for each in api.batches.list(limit=2)]


def ask(key: str = c.KEY, **more: Any) -> Any:
    return client(key=key).chat.completions.create(**asked | more)


@check("models")
def _() -> None:
    assert [same(each).id for each in api.models.list()] == [c.MODEL]
    assert same(api.models.retrieve(c.MODEL)).id == c.MODEL
    c.refused(openai.NotFoundError, lambda: api.models.retrieve("other"), "other")


@check("tools")
def _() -> None:
    forced: Any = {"tools": c.TOOLS, "tool_choice": "required"}
    message = ask(**forced).choices[0].message
    told = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "content": "Rain.",
    }
    same(ask(messages=[*c.ASK, message, told]))
    with api.chat.completions.stream(**asked, **forced) as events:
        [choice] = events.get_final_completion().choices
    c.Place.model_validate_json(choice.message.tool_calls[0].function.arguments)


@check("schema")
def _() -> None:
    answer = api.chat.completions.parse(**asked, response_format=c.Place)
    assert isinstance(answer.choices[0].message.parsed, c.Place)


def embed() -> list[list[float]]:
    create = client(c.EMBEDDING_URL).embeddings.create
    found = same(create(model=c.EMBEDDING_MODEL, input=c.TEXTS)).data
    return [each.embedding for each in found]


@check("responses")
def _() -> None:
    def respond(**more: Any) -> Any:
        base = {"model": c.MODEL, "input": c.QUESTION, "max_output_tokens": 90}
        return api.responses.create(**base | more)

    same(respond())
    events = [
        strict(ResponseStreamEvent, event.to_json()) for event in respond(stream=True)
    ]
    assert events[-1].type in ("response.completed", "response.incomplete"), events
    called = respond(tools=[{"type": "function", **c.TOOL}], tool_choice="required")
    [call] = [each for each in same(called).output if each.type == "function_call"]
    c.Place.model_validate_json(call.arguments)
    parsed = api.responses.parse(model=c.MODEL, input="Hi", text_format=c.Place)
    assert isinstance(parsed.output_parsed, c.Place)
    c.refused(openai.NotFoundError, lambda: respond(model="other"), "other")


@check("files")
def _() -> None:
    sent = c.jsonl(c.LINES)
    file = api.files.create(file=("in.jsonl", sent), purpose="batch")
    assert api.files.wait_for_processing(file.id).status == "processed"
    assert content(same(api.files.retrieve(file.id)).id) == sent
    of: Any = {"file": sent, "filename": "in.jsonl", "bytes": len(sent)}
    upload = api.uploads.upload_file_chunked(**of, mime_type="a/b", purpose="batch")
    assert same(upload).file.bytes == len(sent)
    assert same(api.files.delete(file.id)).deleted
    c.refused(openai.NotFoundError, lambda: content(file.id), file.id)
    place: Any = {"input_file_id": "file-none", "completion_window": "24h"}
    create = api.batches.create
    c.refused(
        openai.BadRequestError, lambda: create(**place, endpoint="/v1/x"), "/v1/x"
    )


@check("batch")
def _() -> None:
    lines = {"plain": {"input": "Hi", "max_output_tokens": 8}, "fails": {"input": 5}}
    made = start(c.jsonl(lines, RESPONSES), RESPONSES)
    found = c.ended(lambda: fetch(made))
    files = content(found.output_file_id), content(found.error_file_id)
    c.answered(*files, Response, lines)


c.check_chats(ask, same)
c.check_vectors(embed)
c.check_results(start, fetch, content)
c.check_batches(start, fetch, api.batches.cancel, listed, openai.NotFoundError)
c.check_errors(
    ask, openai.BadRequestError, openai.AuthenticationError, openai.NotFoundError
)
c.report("openai")
