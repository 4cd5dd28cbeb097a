"""LiteLLM as a library: batches with each provider and way to call, and single calls."""

from __future__ import annotations

import asyncio
import io
import os
from functools import partial
from typing import Any

# What starts at once and calls home where it can is told not to.
os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_TELEMETRY="False")

import checks as c
import litellm
import openai
from checks import check

AT: Any = {"api_base": f"{c.URL}/v1", "api_key": c.KEY, "max_retries": 0}
UNKNOWN = (litellm.NotFoundError, openai.NotFoundError)
loop = asyncio.Runner()


class Files:
    """The functions for files and batches, with a provider, awaited or not.

    Their calls go through a recorder, which tells those of each by their path.
    """

    def __init__(self, provider: str, prefix: str) -> None:
        self._prefix = prefix
        flow = f"library-{provider}-{'async' if prefix else 'sync'}"
        self._at = {"api_base": f"{c.SETTINGS['recorder_url']}/{flow}/v1"}
        self._at |= {"custom_llm_provider": provider, "api_key": c.KEY}

    def call(self, name: str, **arguments: Any) -> Any:
        made = getattr(litellm, self._prefix + name)(**arguments, **self._at)
        return loop.run(made) if self._prefix else made

    def upload(self, content: bytes) -> Any:
        named = ("questions.jsonl", io.BytesIO(content))
        return self.call("create_file", file=named, purpose="batch")

    def start(self, content: bytes) -> str:
        of: Any = {"input_file_id": self.upload(content).id, "endpoint": c.CHAT}
        of |= {"completion_window": "24h", "metadata": {"team": "search"}}
        batch = self.call("create_batch", **of)
        assert batch.metadata == {"team": "search"}, batch
        return str(batch.id)

    def fetch(self, batch: str) -> Any:
        return self.call("retrieve_batch", batch_id=batch)

    def cancel(self, batch: str) -> Any:
        return self.call("cancel_batch", batch_id=batch)

    def content(self, file: str) -> bytes:
        found: bytes = self.call("file_content", file_id=file).content
        return found

    def listed(self) -> list[str]:
        return c.two_pages(lambda **page: self.call("list_batches", **page).data)

    def files(self) -> None:
        sent = c.jsonl(c.LINES)
        file = self.upload(sent)
        assert self.call("file_retrieve", file_id=file.id).bytes == len(sent)
        files = self.call("file_list", purpose="batch").data
        assert file.id in {each.id for each in files}, files
        assert self.content(file.id) == sent
        assert self.call("file_delete", file_id=file.id).deleted
        c.refused(UNKNOWN, lambda: self.content(file.id))
        of: Any = {"input_file_id": file.id, "endpoint": c.CHAT}
        wrong = partial(self.call, "create_batch", completion_window="soon", **of)
        c.refused((litellm.BadRequestError, openai.BadRequestError), wrong, "soon")


def ask(model: str = c.MODEL, key: str = c.KEY, **more: Any) -> Any:
    asked: Any = {"model": f"hosted_vllm/{model}", **c.ASKED, **AT}
    return litellm.completion(**asked | {"api_key": key} | more)


def embed() -> list[list[float]]:
    at = AT | {"api_base": f"{c.EMBEDDING_URL}/v1"}
    named = f"hosted_vllm/{c.EMBEDDING_MODEL}"
    found = litellm.embedding(model=named, input=c.TEXTS, **at)
    return [each["embedding"] for each in found.data]


@check("responses")
def _() -> None:
    asked: Any = {"model": f"openai/{c.MODEL}", "input": "Hi", **AT}
    assert litellm.responses(**asked).usage.output_tokens > 0
    last = [event.type for event in litellm.responses(**asked, stream=True)][-1]
    assert last in ("response.completed", "response.incomplete"), last


@check("messages")
def _() -> None:
    at = AT | {"model": f"anthropic/{c.MODEL}", "api_base": c.URL}
    answer = litellm.completion(messages=c.ASK, max_tokens=90, **at)
    assert answer.usage.completion_tokens > 0


for provider in ("openai", "hosted_vllm"):
    for prefix in ("", "a"):
        each = Files(provider, prefix)
        check("files")(each.files)
        c.check_results(each.start, each.fetch, each.content)
        c.check_batches(each.start, each.fetch, each.cancel, each.listed, UNKNOWN)
c.check_chats(ask, lambda answer: answer)
c.check_vectors(embed)
c.check_errors(
    ask, litellm.BadRequestError, litellm.AuthenticationError, litellm.NotFoundError
)
c.report("litellm")
