"""Whatever a server stores or answers is what its clients' own types say, strictly.

Two versions of OpenAI's client are asked, and Anthropic's. One server has SGLang, the other
the dense engine, with parsers of tool calls and reasoning.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anthropic.types
import httpx
import pytest
from answer_cases import (
    ANSWERED,
    ASK,
    CHAT,
    COMPLETIONS,
    GENERATING,
    LETTERS,
    MESSAGES,
    REFUSED,
    RESPONSES,
    STREAMED,
    full,
    lines,
    online,
    streamed,
)
from batches import client, jsonl, results, submit, wait
from servers import Server, server
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.entrypoints.openai.serving_transcription import (
    OpenAIServingTranscription,
)
from strict_types import fault

from sglang_batch.srt.engine.strict_serving import _MIXINS, TextOffsets, make_strict

NEWEST = Path(sys.prefix) / "newest-openai"
CLIENTS = {"2.8.0": None, "3.54.0": NEWEST}
ENGINES = ("sglang", "dense")
ANTHROPIC: dict[str, Any] = {
    "message": anthropic.types.Message,
    "message event": anthropic.types.RawMessageStreamEvent,
    "message error": anthropic.types.ErrorResponse,
}


class Found(NamedTuple):
    """A JSON text of a server.

    way: how it was asked for: ``batch``, ``online`` or ``stream``.
    kind: of ``strict_types``, or of Anthropic's types.
    """

    way: str
    url: str
    case: str
    kind: str
    text: str


@pytest.fixture(scope="module")
def dense_server(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("strict")
    with server(
        demo_model,
        f"--offline-batch-dir={folder / 'batches'}",
        "--tool-call-parser=qwen25",
        "--reasoning-parser=qwen3",
        module=("sglang_batch", "serve", "--backend=transformers"),
        defaults=("--dtype=float32", "--device=cpu", "--served-model-name=demo"),
        log_dir=folder,
    ) as running:
        yield running


@pytest.fixture(scope="module", params=ENGINES)
def found(
    request: pytest.FixtureRequest, offline_server: Server, dense_server: Server
) -> list[Found]:
    """Everything that one server answers."""
    of = offline_server if request.param == "sglang" else dense_server
    return [*_batches(of), *_online(of), *_objects(of)]


def _batches(of: Server) -> Iterator[Found]:
    api = client(of.url)
    for group in (GENERATING, REFUSED):
        for url, cases in group.items():
            batch = wait(api, submit(api, jsonl(lines({url: cases})), url).id)
            assert batch.status == "completed", batch
            answers = results(api, batch.output_file_id)
            errors = results(api, batch.error_file_id)
            assert len(answers) + len(errors) == len(cases)
            error = "message error" if url == MESSAGES else "error"
            for each in [*answers, *errors]:
                response = each["response"]
                kind = ANSWERED[url] if response["status_code"] == 200 else error
                case = each["custom_id"].removeprefix(f"{url} ")
                yield Found("batch", url, case, kind, json.dumps(response["body"]))


def _online(of: Server) -> Iterator[Found]:
    """What SGLang's routes answer."""
    for url, cases in GENERATING.items():
        for case, body in cases.items():
            status, text = online(of.url, url, full(url, body))
            if status != 200:
                continue
            yield Found("online", url, case, ANSWERED[url], text)
            for event in streamed(of.url, url, full(url, body)):
                if '"error":{' in event:
                    continue
                # OpenAI streams null there, too, and its type has no null.
                ended = event.replace('"finish_reason":null', '"finish_reason":"stop"')
                yield Found("stream", url, case, STREAMED[url], ended)
    for url, cases in REFUSED.items():
        kind = "message error" if url == MESSAGES else "error"
        for case, body in cases.items():
            _, text = online(of.url, url, full(url, body))
            yield Found("online", url, case, kind, text)


def _objects(of: Server) -> Iterator[Found]:
    api = client(of.url)
    content = jsonl(lines({CHAT: {"plain": GENERATING[CHAT]["plain"]}}))
    batch = wait(api, submit(api, content).id)
    upload = {"bytes": len(content), "mime_type": "application/jsonl"}
    upload |= {"filename": "in.jsonl", "purpose": "batch"}
    with httpx.Client(base_url=f"{of.url}/v1", timeout=30) as http:

        def get(kind: str, path: str) -> Found:
            return Found("object", path, kind, kind, http.get(path).text)

        yield get("models", "/models")
        yield get("batch", f"/batches/{batch.id}")
        yield get("batches", "/batches")
        yield get("file", f"/files/{batch.output_file_id}")
        yield get("files", "/files")
        for path in ("/batches/batch_none", "/files/file-none", "/batches?limit=x"):
            yield get("error", path)
        made = http.post("/uploads", json=upload)
        yield Found("object", "/uploads", "created", "upload", made.text)
        place = f"/uploads/{made.json()['id']}"
        part = http.post(f"{place}/parts", files={"data": content})
        yield Found("object", place, "part", "part", part.text)
        whole = http.post(f"{place}/complete", json={"part_ids": [part.json()["id"]]})
        yield Found("object", place, "complete", "upload", whole.text)
        file = http.delete(f"/files/{whole.json()['file']['id']}")
        yield Found("object", "/files", "deleted", "file deleted", file.text)


@pytest.mark.parametrize("version", CLIENTS)
def test_openais_types(found: list[Found], version: str) -> None:
    mine = [each for each in found if each.kind not in ANTHROPIC]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if (before := CLIENTS[version]) is not None:
        environment["PYTHONPATH"] = str(before)
    script = Path(__file__).parents[1] / "helpers" / "strict_types.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        input="\n".join(json.dumps((each.kind, each.text)) for each in mine),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["client"] == version
    _assert_none(mine, report["faults"])
    asked = {(each.way, each.url) for each in mine}
    assert asked >= {
        (way, url) for way in ("batch", "online") for url in (CHAT, RESPONSES)
    }


def test_anthropics_types(found: list[Found]) -> None:
    mine = [each for each in found if each.kind in ANTHROPIC]
    assert {each.way for each in mine} == {"batch", "online", "stream"}
    _assert_none(mine, [fault(ANTHROPIC[each.kind], each.text) for each in mine])


def _assert_none(asked: list[Found], faults: list[str | None]) -> None:
    wrong = [
        f"{each.way} {each.url} {each.case}: {what}"
        for each, what in zip(asked, faults, strict=True)
        if what is not None
    ]
    assert not wrong, "\n".join(wrong)


def test_an_online_error_has_the_fields_of_both(found: list[Found]) -> None:
    for url in (CHAT, COMPLETIONS, RESPONSES):
        (body,) = bodies(found, "online", url, "type")
        error = body["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", None)
        if url != RESPONSES:  # where SGLang has it, too
            assert (body["object"], body["code"]) == ("error", 400)
            assert body["message"] == error["message"]


def test_samples_that_cannot_be_sent_are_answered(dense_server: Server) -> None:
    """The dense engine has no grammars after reasoning. Samples are a list of requests."""
    body = full(CHAT, GENERATING[CHAT]["required tool"])
    status, text = online(dense_server.url, CHAT, body)
    assert (status, "after reasoning" in text) == (400, True)
    body = full(CHAT, {"messages": ASK, "custom_params": {"thinking_budget": 5}})
    status, text = online(dense_server.url, CHAT, body)
    assert (status, "thinking_budget: this server" in text) == (400, True)
    prompts = {"text": ["a", "b"], "sampling_params": {"n": 1, "beam_width": 2}}
    status, text = online(dense_server.url, "/generate", prompts)
    assert (status, "beam_width" in text) == (400, True)


def bodies(found: list[Found], way: str, url: str, case: str) -> list[dict[str, Any]]:
    return [json.loads(each.text) for each in found if each[:3] == (way, url, case)]


def test_metadata_are_texts(found: list[Found]) -> None:
    for way in ("batch", "online"):
        (body,) = bodies(found, way, CHAT, "extras")
        assert body["metadata"] == {"weight_version": "default"}
        assert body["choices"][0]["meta_info"]["weight_version"] == "default"


def test_a_message_tells_the_sequence_that_ended_it(found: list[Found]) -> None:
    for way in ("batch", "online"):
        (body,) = bodies(found, way, MESSAGES, "stopped")
        assert body["stop_reason"] == "stop_sequence", body
        assert body["stop_sequence"] in LETTERS
        (other,) = bodies(found, way, MESSAGES, "plain")
        assert other["stop_reason"] == "max_tokens"
        assert other.get("stop_sequence") is None
    events = bodies(found, "stream", MESSAGES, "stopped")
    (delta,) = [each["delta"] for each in events if each["type"] == "message_delta"]
    assert delta == {
        "stop_reason": "stop_sequence",
        "stop_sequence": body["stop_sequence"],
    }


@pytest.mark.parametrize(("case", "tokens"), [("one token", 1), ("cut", 2)])
def test_a_response_has_all_its_tokens(
    found: list[Found], case: str, tokens: int
) -> None:
    for way in ("batch", "online"):
        (body,) = bodies(found, way, RESPONSES, case)
        assert body["usage"]["output_tokens"] == tokens
        assert (body["max_output_tokens"], body["status"]) == (tokens, "incomplete")


def test_places_of_tokens_are_in_the_text(found: list[Found]) -> None:
    cases = [
        name for name, body in GENERATING[COMPLETIONS].items() if body.get("logprobs")
    ]
    for case in cases:
        (body,) = bodies(found, "batch", COMPLETIONS, case)
        for choice in body["choices"]:
            shown = choice["logprobs"]
            assert len(shown["text_offset"]) == len(shown["tokens"])
            for place, token in zip(shown["text_offset"], shown["tokens"], strict=True):
                # A part of a character is shown as its byte, the end of an answer not.
                rest = choice["text"][place:]
                hidden = not token.isascii() or not rest
                assert hidden or rest.startswith(token), (case, shown)
        chunks = [
            each["choices"][0]
            for each in bodies(found, "stream", COMPLETIONS, case)
            if each["choices"]
        ]
        if chunks:
            streamed_places = {
                i: [
                    place
                    for c in chunks
                    if c["index"] == i and c["logprobs"]
                    for place in c["logprobs"]["text_offset"]
                ]
                for i in range(len(body["choices"]))
            }
            assert streamed_places == {
                i: c["logprobs"]["text_offset"] for i, c in enumerate(body["choices"])
            }


def test_a_prompt_is_scored_without_an_answer(found: list[Found]) -> None:
    (scored,) = bodies(found, "batch", COMPLETIONS, "scored")
    (echoed,) = bodies(found, "batch", COMPLETIONS, "echo logprobs")
    (choice,), (longer,) = scored["choices"], echoed["choices"]
    assert choice["text"] == GENERATING[COMPLETIONS]["scored"]["prompt"]
    assert (scored["usage"]["completion_tokens"], choice["finish_reason"]) == (
        0,
        "length",
    )
    logprobs, others = choice["logprobs"], longer["logprobs"]
    count = scored["usage"]["prompt_tokens"]
    assert logprobs["tokens"] == others["tokens"][:count]
    assert logprobs["token_logprobs"] == pytest.approx(
        others["token_logprobs"][:count], abs=1e-4
    )
    for case in ("scored lists", "scored n"):
        (body,) = bodies(found, "batch", COMPLETIONS, case)
        assert len(body["choices"]) == 2
        for one in body["choices"]:
            assert len(one["logprobs"]["tokens"]) == len(one["text"])


@pytest.mark.parametrize(
    ("parts", "places"),
    [
        ([("ab cd", ["ab", " cd"])], [0, 2]),
        # The text hides a token, and one tokenizer hides a space.
        ([("ab cd", ["<s>", "ab", "cd"])], [0, 0, 2]),
        ([("tüß", ["t", "Ã", "¼", "ß"])], [0, 1, 1, 2]),
        # The text ends before the token that stopped it.
        ([("ab", ["ab", " stop"])], [0, 2]),
        (
            [("a", ["a"]), ("b", ["b"]), ("", ["Ã"]), ("ü", ["¼"]), ("c", ["c"])],
            [0, 1, 2, 2, 3],
        ),
    ],
)
def test_places(parts: list[tuple[str, list[str]]], places: list[int]) -> None:
    offsets = TextOffsets()
    assert [each for part in parts for each in offsets.of(*part)] == places


@pytest.mark.parametrize("mixin", _MIXINS)
def test_sglang_has_what_is_overridden(mixin: str) -> None:
    kinds = (
        AnthropicServing,
        OpenAIServingChat,
        OpenAIServingCompletion,
        OpenAIServingResponses,
        OpenAIServingTranscription,
    )
    (kind,) = [each for each in kinds if each.__name__ == mixin]
    ours = {name for name, value in vars(_MIXINS[mixin]).items() if callable(value)}
    assert ours and all(hasattr(kind, name) for name in ours)
    stock: Any = object.__new__(kind)
    stock.openai_serving_chat = object.__new__(OpenAIServingChat)
    handler = make_strict(stock)
    assert isinstance(handler, kind) and isinstance(handler, _MIXINS[mixin])
    assert type(stock) is kind  # other engines of the process have it
    assert vars(handler) is vars(stock)
    assert make_strict(handler) is handler
