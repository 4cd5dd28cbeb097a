"""What an answer says decides nothing about its error: of any endpoint, whatever fails."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from pydantic import BaseModel

from sglang_batch.request import RequestOutput
from sglang_batch.srt.engine.sglang_engine import EarlyEnds, SGLangEngine

TEXTS = ["Grammar accept_token failed", "Aborted by AbortReq", "the context length"]
KINDS: list[Any] = [ValueError, KeyError, lambda text: HTTPException(400, text)]
URLS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]


class _Unsendable(BaseModel):
    text: str = "\ud800"


class _Call:
    """A call whose request was answered."""

    def __init__(self, result: object) -> None:
        report = {"prompt_tokens": 5, "completion_tokens": 3}
        sent = SimpleNamespace(answer={"meta_info": report}, adapted=SimpleNamespace())
        self.submissions = [sent]
        self._result = result

    async def run(self) -> object:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


def output(url: str, result: object) -> RequestOutput:
    engine: Any = object.__new__(SGLangEngine)
    manager: Any = SimpleNamespace()
    engine._early_ends = EarlyEnds(manager)
    engine.num_replicas = 1
    line: Any = SimpleNamespace(call=_Call(result), url=url, rid="x")
    found: RequestOutput = asyncio.run(engine._execute(line, None))
    return found


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("url", URLS)
def test_the_text_of_an_answer_blames_nobody(url: str, kind: Any, text: str) -> None:
    found = output(url, kind(text))
    assert (found.status_code, found.usage.output_tokens) == (500, 3)
    error = json.loads(found.body)["error"]
    assert error["type"] == ("api_error" if url == "/v1/messages" else "server_error")
    assert error.get("code") is None


@pytest.mark.parametrize("url", URLS)
def test_an_answer_that_json_cannot_encode_ends_no_job(url: str) -> None:
    found = output(url, _Unsendable())
    assert (found.status_code, found.usage.output_tokens) == (500, 3)
