"""What goes wrong with an answer is the server's error, and its tokens are counted."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from fastapi import HTTPException
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.job.retrying_engine import RetryingEngine
from sglang_batch.request import BatchRequestInput, RequestOutput, engine_request_id
from sglang_batch.run.backend_options import transformers_engine
from sglang_batch.srt.dense import manager
from sglang_batch.srt.dense.engine import DenseEngine

# SGLang answers errors with a class that its web framework wants to drop.
# It also reads fields that it calls deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:ORJSONResponse"),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated"),
]

Engine = tuple[DenseEngine, asyncio.AbstractEventLoop]
ASK = [{"role": "user", "content": "Why?"}]
TOKENS = 5
# Endpoint -> a body, and where SGLang makes its answer.
ENDPOINTS: dict[str, tuple[dict[str, Any], type, str]] = {
    "/v1/chat/completions": (
        {"messages": ASK, "max_tokens": TOKENS},
        OpenAIServingChat,
        "_build_chat_response",
    ),
    "/v1/completions": (
        {"prompt": "Why?", "max_tokens": TOKENS},
        OpenAIServingCompletion,
        "_build_completion_response",
    ),
    "/v1/responses": (
        {"input": "Why?", "max_output_tokens": TOKENS},
        OpenAIServingResponses,
        "_make_response_output_items",
    ),
    "/v1/messages": (
        {"messages": ASK, "max_tokens": TOKENS},
        AnthropicServing,
        "_convert_response",
    ),
}


def _raises(error: Exception) -> Callable[..., Any]:
    def convert(*args: object, **kwargs: object) -> Any:
        raise error

    return convert


def _invalid(*args: object, **kwargs: object) -> Any:
    return TypeAdapter(dict[str, int]).validate_python(5)


FAULTS: dict[str, Callable[..., Any]] = {
    "validation": _invalid,
    "value": _raises(ValueError("no object")),
    "type": _raises(TypeError("no object")),
    "key": _raises(KeyError("no object")),
    "http": _raises(HTTPException(400, "no object")),
}


@pytest.fixture(scope="module")
def engine(neo_model: Path) -> Iterator[Engine]:
    argv = ["--model-path", str(neo_model), "--dtype=float32", "--device=cpu"]
    _, start = transformers_engine(argv)
    with start() as (found, loop):
        loop.run_until_complete(found.connect())
        yield found, loop


_jobs = itertools.count()


def answer(served: Engine, url: str, body: dict[str, Any]) -> tuple[RequestOutput, int]:
    """The output of a line with attempts, and how often it was sent again."""
    engine, loop = served
    retrying = RetryingEngine(engine, OfflineBatchConfig())

    async def one() -> RequestOutput:
        body_bytes = json.dumps({"ignore_eos": True, **body}).encode()
        request = BatchRequestInput(0, "x", url, body_bytes)
        rid = engine_request_id(f"batch_u{next(_jobs)}", 0)
        prepared = await retrying.prepare(request, rid, tokenize=True)
        assert not isinstance(prepared, RequestOutput), prepared
        return await retrying.execute(prepared)

    output = loop.run_until_complete(asyncio.wait_for(one(), 60))
    return output, retrying.num_retries


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("url", ENDPOINTS)
def test_an_answer_that_cannot_be_converted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, url: str, fault: str
) -> None:
    body, kind, method = ENDPOINTS[url]
    good, _ = answer(engine, url, body)
    assert good.status_code == HTTPStatus.OK, good
    monkeypatch.setattr(kind, method, FAULTS[fault])
    bad, retries = answer(engine, url, body)
    assert (bad.status_code, retries) == (500, 0)
    assert bad.usage == good.usage
    assert bad.usage.output_tokens > 0
    error = json.loads(bad.body)["error"]
    expected = "api_error" if url == "/v1/messages" else "server_error"
    assert error["type"] == expected


def test_the_prompt_of_several_samples_counts_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "Why?", "n": 3, "max_tokens": TOKENS}
    good, _ = answer(engine, "/v1/completions", body)
    monkeypatch.setattr(OpenAIServingCompletion, "_build_completion_response", _invalid)
    bad, _ = answer(engine, "/v1/completions", body)
    assert bad.status_code == 500
    assert (bad.usage.input_tokens, bad.usage.output_tokens) == (
        good.usage.input_tokens,
        good.usage.output_tokens,
    )
    assert bad.usage.output_tokens == 3 * TOKENS


def test_an_error_that_sglang_answers_after_it_generated(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = JSONResponse({"message": "no object"}, status_code=400)
    monkeypatch.setattr(
        OpenAIServingCompletion,
        "_build_completion_response",
        lambda *args, **kwargs: refused,
    )
    bad, _ = answer(engine, "/v1/completions", {"prompt": "a", "max_tokens": TOKENS})
    assert (bad.status_code, bad.usage.output_tokens) == (500, TOKENS)
    assert "no object" in json.loads(bad.body)["error"]["message"]


def test_an_answer_that_the_engine_cannot_give(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "Why?", "max_tokens": TOKENS}
    good, _ = answer(engine, "/v1/completions", body)
    monkeypatch.setattr(manager, "token_output", _invalid)
    bad, retries = answer(engine, "/v1/completions", body)
    assert (bad.status_code, retries, bad.usage) == (500, 0, good.usage)


def test_what_is_refused_before_is_the_clients(engine: Engine) -> None:
    refused = {"prompt": [60] * 300, "max_tokens": 4}
    bad, _ = answer(engine, "/v1/completions", refused)
    assert (bad.status_code, bad.usage.output_tokens) == (400, 0)
