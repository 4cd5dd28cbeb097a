"""What the scripts of the clients share: their settings, questions, checks and report.

``bench_clients.py`` runs each with the Python of its client, ``python SCRIPT SETTINGS``. It prints
its checks, and then a line of JSON for each.
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter

SETTINGS: dict[str, str] = json.loads(sys.argv[1])
URL, EMBEDDING_URL = SETTINGS["url"], SETTINGS["embedding_url"]
GATHER_URL = SETTINGS["gather_url"]
MODEL, EMBEDDING_MODEL = SETTINGS["model"], SETTINGS["embedding_model"]
KEY, WRONG_KEY = SETTINGS["key"], "sk-of-nobody"
ENDED = ("completed", "failed", "cancelled", "expired")
PATIENCE_S, POLL_S = 120, 0.2
# Of texts with prefixes in common: more tokens than the server has KV for.
FAMILIES, MEMBERS, PREFIX = 50, 8, 500
ENOUGH = 0.99  # of their common tokens come from the cache

CHAT, QUESTION = "/v1/chat/completions", "What is a tuple?"
ASK: Any = [{"role": "user", "content": QUESTION}]
TEXTS = ["a tuple", "a list"]
CITY = {"enum": ["Bonn", "Rome"], "type": "string"}
SCHEMA: Any = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
SCHEMA |= {"additionalProperties": False}
TOOL: Any = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": TOOL}]


class Place(BaseModel):
    """An answer by schema."""

    city: Literal["Bonn", "Rome"]


# A random model may end its answer at once unless it is greedy.
ASKED: Any = {"messages": ASK, "max_tokens": 90, "temperature": 0}
SHORT: Any = {"messages": ASK, "max_tokens": 8}
LONG: Any = {"messages": ASK, "max_tokens": 900, "ignore_eos": True}
# Of a batch of chats: the fields of each line besides the model. The last one is refused.
LINES: dict[str, Any] = {
    "plain": SHORT,
    "logprobs": {**SHORT, "logprobs": True, "top_logprobs": 2},
    "tool": {**ASKED, "tools": TOOLS, "tool_choice": "required"},
    "fails": {**SHORT, "temperature": -1},
}


def jsonl(bodies: dict[str, Any], url: str = CHAT, model: str = MODEL) -> bytes:
    """The file of a batch."""
    same = {"method": "POST", "url": url}
    lines = [
        {"custom_id": name, **same, "body": {"model": model, **body}}
        for name, body in bodies.items()
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


_checks: defaultdict[str, list[Callable[[], Any]]] = defaultdict(list)
_beyond: set[str] = set()


def check(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Name a function that raises if the client does not work. A check may have several."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        _checks[name].append(function)
        return function

    return add


def report(package: str) -> None:
    """Print the client's version and its checks, then each outcome as it comes."""
    about = {"version": version(package), "checks": [*_checks]}
    print(json.dumps(about), flush=True)
    for name, functions in _checks.items():
        _beyond.clear()
        why = None
        try:
            for function in functions:
                function()
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"
        outcome = {"check": name, "why": why, "beyond": sorted(_beyond)}
        print(json.dumps(outcome), flush=True)


def refused(kinds: Any, call: Callable[[], Any], said: str = "") -> None:
    """A call that raises one of the client's errors, with these words of the server's."""
    try:
        answer = call()
    except kinds as error:
        assert said in str(error), f"{error!r} does not say {said!r}"
    else:
        raise AssertionError(f"not refused: {answer}")


def ended(fetch: Callable[[], Any], states: Iterable[str] = ENDED) -> Any:
    """A batch, once its status is one of ``states``."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := fetch()).status not in states:
        assert time.monotonic() < deadline, found
        time.sleep(POLL_S)
    return found


def strict(kind: Any, text: str | bytes) -> Any:
    """JSON as an object of the client's type: every field there, and of its own type.

    Fields that the type does not have are told with the check.
    """
    found = TypeAdapter(kind).validate_json(text, strict=True)
    _beyond.update(_unknown(found))
    return found


def same(found: Any) -> Any:
    """An object of the client's, read again strictly: clients build theirs unchecked."""
    return strict(type(found), found.to_json())


def _unknown(found: Any) -> Iterator[str]:
    if isinstance(found, list):
        for each in found:
            yield from _unknown(each)
    elif isinstance(found, BaseModel):
        yield from (
            f"{type(found).__name__}.{name}" for name in found.model_extra or {}
        )
        for name in type(found).model_fields:
            yield from _unknown(getattr(found, name, None))


# Checks that are alike for many clients -------------------------------------------


def answered(output: bytes, errors: bytes, kind: Any, names: Iterable[str]) -> None:
    """The result files of a batch whose last line is refused."""
    *good, bad = names
    lines = [json.loads(line) for line in output.splitlines()]
    assert [line["custom_id"] for line in lines] == good, lines
    for line in lines:
        assert (line["error"], line["response"]["status_code"]) == (None, 200), line
        strict(kind, json.dumps(line["response"]["body"]))
    [line] = map(json.loads, errors.splitlines())
    assert (line["custom_id"], line["error"]) == (bad, None), line
    assert line["response"]["status_code"] == 400, line
    error = line["response"]["body"]["error"]
    assert set(error) == {"message", "type", "param", "code"}, line


def check_results(
    start: Callable[[bytes], str],
    fetch: Callable[[str], Any],
    content: Callable[[str], bytes],
) -> None:
    """A batch of chats, read with the types of OpenAI's client."""
    from openai.types.chat import ChatCompletion

    @check("batch")
    def _() -> None:
        made = start(jsonl(LINES))
        found = ended(lambda: fetch(made))
        counts = found.request_counts
        assert (found.status, counts.completed, counts.failed) == ("completed", 3, 1)
        files = content(found.output_file_id), content(found.error_file_id)
        answered(*files, ChatCompletion, LINES)


def check_batches(
    start: Callable[[bytes], str],
    fetch: Callable[[str], Any],
    cancel: Callable[[str], Any],
    listed: Callable[[], list[str]] | None,
    unknown: Any,
) -> None:
    """Cancelling, lists, and what is refused.

    start: a batch of these lines. Returns its id.
    listed: the ids of all batches, in pages.
    unknown: the error for an id that no batch has.
    """

    @check("cancel")
    def _() -> None:
        made = start(jsonl({f"long-{i}": LONG for i in range(10)}))
        cancel(made)
        assert ended(lambda: fetch(made)).status == "cancelled"

    @check("bad file")
    def _() -> None:
        for content in (b"not JSON\n", jsonl(LINES, model="other")):
            made = start(content)
            assert ended(partial(fetch, made)).status == "failed"

    @check("unknown batch")
    def _() -> None:
        for call in (fetch, cancel):
            refused(unknown, partial(call, "batch_none"), "batch_none")

    if listed is not None:

        @check("paging")
        def _() -> None:
            made = [start(jsonl({"plain": SHORT})) for _ in range(3)]
            ids = listed()
            assert ids[:3] == made[::-1] and len(set(ids)) == len(ids), (made, ids)


def check_plan(ask_all: Callable[[list[str], str], Any]) -> None:
    """Calls in no order compute what they share once, at a server that gathers them.

    ask_all: makes calls for these texts, at this URL.
    """

    salt = len(_checks["plan"])

    @check("plan")
    def _() -> None:
        texts = [
            f"{salt}{family:02d}".ljust(PREFIX, "-") + f"{member}"
            for family in range(FAMILIES)
            for member in range(MEMBERS)
        ]
        random.Random(1).shuffle(texts)
        before = _used()
        ask_all(texts, GATHER_URL)
        deadline = time.monotonic() + PATIENCE_S
        # A token is a byte. Usage is counted when a call has ended.
        while (found := _used() - before)["input_tokens"] < len("".join(texts)):
            assert time.monotonic() < deadline, found
            time.sleep(POLL_S)
        share = found["cached_tokens"] / ((MEMBERS - 1) * FAMILIES * PREFIX)
        assert share >= ENOUGH, f"{share:.1%} of the shared tokens were cached"


def _used() -> Counter[str]:
    """The tokens of this client's calls."""
    headers = {"Authorization": f"Bearer {KEY}"}
    usage = f"{GATHER_URL}/offline_batch/usage"
    asked = urllib.request.Request(usage, headers=headers)
    with urllib.request.urlopen(asked) as answer:
        rows = json.load(answer)["data"]
    names = ("input_tokens", "cached_tokens")
    return Counter({name: sum(row[name] for row in rows) for name in names})


def two_pages(page: Callable[..., Iterable[Any]]) -> list[str]:
    """The ids of the newest batch, and of those after it."""
    [newest] = [each.id for each in page(limit=1)]
    return [newest, *(each.id for each in page(limit=100, after=newest))]


def check_chats(ask: Callable[..., Any], read: Callable[[Any], Any]) -> None:
    """Chats of each kind, in the types of OpenAI's client.

    ask: a chat with these arguments.
    read: an answer, or a chunk of one, once more and strictly.
    """

    @check("chat")
    def _() -> None:
        assert len(read(ask(logprobs=True, top_logprobs=2, n=2)).choices) == 2

    @check("stream")
    def _() -> None:
        chunks = [*map(read, ask(stream=True, stream_options={"include_usage": True}))]
        parts = [each for chunk in chunks for each in chunk.choices]
        assert any(each.delta.content for each in parts), parts
        assert [each.finish_reason for each in parts][-1] in ("stop", "length"), parts
        assert chunks[-1].usage.completion_tokens > 0, chunks[-1]

    @check("tools")
    def _() -> None:
        answer = read(ask(tools=TOOLS, tool_choice="required"))
        [call] = answer.choices[0].message.tool_calls
        Place.model_validate_json(call.function.arguments)

    @check("schema")
    def _() -> None:
        named = {"name": "place", "schema": SCHEMA, "strict": True}
        answer = ask(response_format={"type": "json_schema", "json_schema": named})
        Place.model_validate_json(read(answer).choices[0].message.content)


def check_vectors(embed: Callable[[], list[list[float]]]) -> None:
    """The embeddings of TEXTS."""

    @check("embeddings")
    def _() -> None:
        assert [len(each) for each in embed()] == [384, 384]


def check_errors(ask: Callable[..., Any], call: Any, key: Any, model: Any) -> None:
    """Single calls that are refused.

    ask: a chat with these arguments.
    call, key, model: the errors for a bad one.
    """
    check("bad call")(lambda: refused(call, lambda: ask(temperature=-1), "temperature"))
    check("bad key")(lambda: refused(key, lambda: ask(key=WRONG_KEY)))
    check("bad model")(lambda: refused(model, lambda: ask(model="other"), "other"))
