"""``/v1/responses`` in the background: whose a response is, how it ends, what is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from batches import ADMIN, ANN, BOB, client
from openai.types.responses import Response
from servers import Server
from sglang.srt.entrypoints.openai.protocol import ResponsesResponse

from sglang_batch.server.access.keys import Role, caller_of
from sglang_batch.server.http.authorization import current_caller
from sglang_batch.srt.engine import strict_serving
from sglang_batch.srt.engine.strict_serving import KeptResponses

RUNNING = ("queued", "in_progress")
# Answers that end at their limit.
SCHEMA = {"type": "string", "minLength": 1600}
ENDLESS = {
    "text": {"format": {"type": "json_schema", "name": "text", "schema": SCHEMA}},
    "reasoning": {"effort": "none"},
    "max_output_tokens": 20,
}
LONG = {"max_output_tokens": 1500}


@pytest.fixture
def ann(keyed_server: Server) -> openai.OpenAI:
    return client(keyed_server.url, ANN)


@pytest.fixture
def brian(keyed_server: Server) -> openai.OpenAI:
    return client(keyed_server.url, BOB)


def create(api: openai.OpenAI, text: str, **fields: Any) -> Response:
    given = ENDLESS | {"background": True} | fields
    made: Response = api.responses.create(model="demo", input=text, **given)
    return made


def ended(api: openai.OpenAI, response: Response) -> Response:
    until(lambda: api.responses.retrieve(response.id).status not in RUNNING)
    return api.responses.retrieve(response.id)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def num_running(server: Server) -> int:
    headers = {"authorization": f"Bearer {ADMIN}"}
    answer = httpx.get(f"{server.url}/server_info", headers=headers, timeout=30)
    states = answer.json()["internal_states"]
    return sum(state["offline_batch"]["kv_use"]["running"] for state in states)


def tokens_of(server: Server, name: str) -> int:
    headers = {"authorization": f"Bearer {ADMIN}"}
    answer = httpx.get(f"{server.url}/offline_batch/usage", headers=headers)
    rows = answer.json()["data"]
    return sum(row["total_tokens"] for row in rows if row["name"] == name)


def test_a_response_runs_on_after_the_call_and_is_charged(
    keyed_server: Server, brian: openai.OpenAI
) -> None:
    before = tokens_of(keyed_server, "brian")
    made = create(brian, "What is a tuple?")
    assert made.status == "queued"
    done = ended(brian, made)
    assert (done.status, done.error) == ("incomplete", None)
    assert done.usage is not None and done.usage.output_tokens == 20
    total = before + done.usage.total_tokens
    until(lambda: tokens_of(keyed_server, "brian") == total)
    more = create(brian, "And a list?", previous_response_id=done.id, background=False)
    assert more.usage is not None
    assert more.usage.input_tokens > done.usage.total_tokens


def test_another_keys_response_is_as_one_that_does_not_exist(
    keyed_server: Server, ann: openai.OpenAI, brian: openai.OpenAI
) -> None:
    mine = create(ann, "long", **LONG)
    for id_ in ("resp_none", mine.id):
        calls: list[Callable[[], Any]] = [
            lambda id_=id_: brian.responses.retrieve(id_),
            lambda id_=id_: brian.responses.cancel(id_),
            lambda id_=id_: create(brian, "go on", previous_response_id=id_),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError) as refused:
                call()
            assert (
                refused.value.body["message"] == f"Response with id {id_!r} not found."
            )
    # Nor can it be replaced.
    other = create(brian, "mine", extra_body={"request_id": mine.id}, background=False)
    assert other.id != mine.id
    assert client(keyed_server.url, ADMIN).responses.retrieve(mine.id).id == mine.id
    assert ann.responses.retrieve(mine.id).status in RUNNING
    ann.responses.cancel(mine.id)


def test_a_cancelled_response_leaves_the_engine(
    keyed_server: Server, ann: openai.OpenAI
) -> None:
    made = create(ann, "long", **LONG)
    until(lambda: num_running(keyed_server))
    assert ann.responses.cancel(made.id).status == "cancelled"
    until(lambda: not num_running(keyed_server))
    again = ann.responses.cancel(made.id)
    assert (again.status, again.usage, again.error) == ("cancelled", None, None)


def test_a_failed_response_ends(ann: openai.OpenAI) -> None:
    made = ended(ann, create(ann, "x " * 5000))
    assert made.status == "failed" and made.error is not None
    assert made.error.code == "server_error"
    assert "longer than the model's context length" in made.error.message


def test_flex_responses_count_until_their_end(
    keyed_server: Server, ann: openai.OpenAI
) -> None:
    first = create(ann, "long", **LONG)
    # Next to it, two of the 40 requests that may run are theirs.
    flex = [create(ann, f"{n}", service_tier="flex", **LONG) for n in range(2)]
    late = client(keyed_server.url, ANN).with_options(timeout=1, max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        create(late, "late", service_tier="flex", **LONG)
    assert create(ann, "ordinary").status == "queued"
    ann.responses.cancel(flex[0].id)
    made = create(ann, "again", service_tier="flex", **LONG)
    # The place was not taken by the call whose client has left.
    assert ann.responses.retrieve(flex[1].id).status == "in_progress"
    for each in (made, *flex, first):
        ann.responses.cancel(each.id)


@pytest.fixture
def as_key() -> Iterator[Callable[[str], None]]:
    before = current_caller.get()
    yield lambda name: current_caller.set(caller_of(name, Role.CLIENT)) and None
    current_caller.set(before)


def test_of_each_key_the_newest_are_kept(
    monkeypatch: pytest.MonkeyPatch, as_key: Callable[[str], None]
) -> None:
    monkeypatch.setattr(strict_serving, "MOST_KEPT", 3)
    kept = KeptResponses()

    def ids() -> str:
        return "".join(each for each in "abcdefgh" if kept.get(each) is not None)

    as_key("ann")
    running = ResponsesResponse.model_construct(status="in_progress")
    kept["a"] = running
    for each in "bcde":
        kept[each] = each
    assert ids() == "acde"  # and what runs
    as_key("brian")
    assert ids() == ""
    assert kept["a"] is None
    kept["f"] = "f"
    assert ids() == "f"
    as_key("ann")
    running.status = "completed"
    kept["c"] = "c"  # again, as the newest
    kept["g"] = "g"
    assert ids() == "ceg"
    as_key("brian")
    assert ids() == "f"
