"""Every batch and file call that LiteLLM has, against a server: as a library and as a proxy.

    python -P litellm_calls.py URL MODEL

URL is that of a :class:`request_recorder.RequestRecorder`, which tells the requests of each check by the
first part of their path. Runs in an environment with LiteLLM alone. The last line of the output
is JSON: the outcome of each check, ``null`` or the error.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

CHAT: Any = "/v1/chat/completions"
ENDED = ("completed", "failed", "cancelled", "expired")
PROVIDERS = ("openai", "hosted_vllm")
MASTER_KEY = "sk-benchmark"
TIMEOUT_S = 120
# What starts at once and calls home where it can is told not to.
ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_POLICY_TEMPLATES": "True",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_TELEMETRY": "False",
    "NO_PROXY": "127.0.0.1",
}


def short_lines(model: str) -> bytes:
    """Three chat completions, and one that is refused."""
    lines = [line(model, f"line-{i}", 4) for i in range(3)]
    return b"".join([*lines, line(model, "fails", -1)])


def long_lines(model: str) -> bytes:
    """Chat completions that take a while."""
    return b"".join(line(model, f"long-{i}", 1000) for i in range(10))


def line(model: str, custom_id: str, max_tokens: int) -> bytes:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"What is {custom_id}?"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    found = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}
    return json.dumps(found).encode() + b"\n"


def check_answers(content: bytes, model: str) -> None:
    """The lines of an output file."""
    found = [json.loads(line) for line in content.splitlines()]
    ids = [line["custom_id"] for line in found]
    assert ids == ["line-0", "line-1", "line-2"], ids
    for line in found:
        assert line["error"] is None, line
        assert line["response"]["status_code"] == 200, line
        body = line["response"]["body"]
        assert body["model"] == model, body
        assert body["choices"][0]["message"]["role"] == "assistant", body
        assert body["usage"]["completion_tokens"] > 0, body


class Library:
    """LiteLLM's functions, with a provider and its address."""

    def __init__(self, url: str, model: str, provider: str, *, is_async: bool) -> None:
        import litellm  # type: ignore[import-not-found]

        self._litellm = litellm
        self._is_async = is_async
        self._url = url
        self._kind = f"{provider}-{'async' if is_async else 'sync'}"
        self._where = {"custom_llm_provider": provider, "api_key": "none"}
        self._model = model

    def named(self, check: str) -> str:
        """The name of a check, and the address by which its requests are told."""
        name = f"library-{self._kind}-{check}"
        self._where["api_base"] = f"{self._url}/{name}/v1"
        return name

    async def call(self, name: str, **arguments: Any) -> Any:
        if self._is_async:
            return await getattr(self._litellm, f"a{name}")(**arguments, **self._where)
        function = getattr(self._litellm, name)
        return await asyncio.to_thread(function, **arguments, **self._where)

    async def run(self) -> None:
        """A batch from its upload to the end of its files."""
        model = self._model
        named = ("questions.jsonl", io.BytesIO(short_lines(model)))
        file = await self.call("create_file", file=named, purpose="batch")
        assert (file.object, file.purpose) == ("file", "batch"), file
        again = await self.call("file_retrieve", file_id=file.id)
        assert again.id == file.id and again.bytes == file.bytes, again
        files = await self.call("file_list", purpose="batch")
        assert file.id in {each.id for each in files.data}, files
        sent = await self.call("file_content", file_id=file.id)
        assert sent.content == short_lines(model)
        batch = await self.call(
            "create_batch",
            input_file_id=file.id,
            endpoint=CHAT,
            completion_window="24h",
            metadata={"team": "search", "number": "7"},
        )
        assert batch.object == "batch" and batch.input_file_id == file.id, batch
        batch = await self.ended(batch)
        assert batch.status == "completed", batch
        assert batch.metadata == {"team": "search", "number": "7"}, batch
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (4, 3, 1), counts
        output = await self.call("file_content", file_id=batch.output_file_id)
        check_answers(output.content, model)
        errors = await self.call("file_content", file_id=batch.error_file_id)
        [error] = [json.loads(line) for line in errors.content.splitlines()]
        assert error["custom_id"] == "fails", error
        assert error["response"]["status_code"] == 400, error
        listed = await self.call("list_batches", limit=100)
        assert batch.id in {each.id for each in listed.data}, listed
        after = await self.call("list_batches", limit=1, after=batch.id)
        assert batch.id not in {each.id for each in after.data}, after
        deleted = await self.call("file_delete", file_id=file.id)
        assert deleted.id == file.id and deleted.deleted, deleted

    async def cancel(self) -> None:
        """A batch that is cancelled."""
        named = ("questions.jsonl", io.BytesIO(long_lines(self._model)))
        file = await self.call("create_file", file=named, purpose="batch")
        batch = await self.call(
            "create_batch",
            input_file_id=file.id,
            endpoint=CHAT,
            completion_window="24h",
        )
        batch = await self.call("cancel_batch", batch_id=batch.id)
        assert batch.status in ("cancelling", "cancelled"), batch
        batch = await self.ended(batch)
        assert batch.status == "cancelled", batch
        assert batch.cancelled_at >= batch.created_at, batch

    async def refuse(self) -> None:
        """Calls for missing objects, and a batch of a file that is none."""
        unknown = self._litellm.NotFoundError
        await self.fails(unknown, "retrieve_batch", batch_id="batch_none")
        await self.fails(unknown, "cancel_batch", batch_id="batch_none")
        await self.fails(unknown, "file_retrieve", file_id="file-none")
        await self.fails(unknown, "file_content", file_id="file-none")
        bad = self._litellm.BadRequestError
        await self.fails(
            bad,
            "create_batch",
            input_file_id="file-none",
            endpoint=CHAT,
            completion_window="soon",
        )
        named = ("questions.jsonl", io.BytesIO(b"no json\n"))
        file = await self.call("create_file", file=named, purpose="batch")
        batch = await self.call(
            "create_batch",
            input_file_id=file.id,
            endpoint=CHAT,
            completion_window="24h",
        )
        batch = await self.ended(batch)
        assert batch.status == "failed", batch
        assert batch.errors.data[0].line == 1, batch

    async def fails(self, kind: type[Exception], name: str, **arguments: Any) -> None:
        try:
            answer = await self.call(name, **arguments)
        except Exception as error:
            status = getattr(error, "status_code", None)
            wanted = getattr(kind, "__name__", "")
            # Some calls raise the OpenAI client's error as it is.
            codes = {"NotFoundError": 404, "BadRequestError": 400}
            assert isinstance(error, kind) or status == codes[wanted], repr(error)
            return
        raise AssertionError(f"{name} was not refused: {answer}")

    async def ended(self, batch: Any) -> Any:
        deadline = time.monotonic() + TIMEOUT_S
        while batch.status not in ENDED:
            assert time.monotonic() < deadline, batch
            await asyncio.sleep(0.2)
            batch = await self.call("retrieve_batch", batch_id=batch.id)
        return batch


class Proxy:
    """The OpenAI client against LiteLLM's proxy.

    Args:
        named: how calls name the deployment: by the header ``x-litellm-model``, or by the
            provider.
    """

    def __init__(self, url: str, model: str, alias: str, named: dict[str, Any]) -> None:
        from openai import OpenAI

        self._model = model
        self._alias = alias
        self._header = named.get("headers", {})
        self._body = named.get("body", {})
        self._query = named.get("query", {})
        self._api = OpenAI(
            base_url=f"{url}/v1", api_key=MASTER_KEY, timeout=TIMEOUT_S, max_retries=0
        )

    def upload(self, content: bytes) -> Any:
        return self._api.files.create(
            file=("questions.jsonl", content),
            purpose="batch",
            extra_headers=self._header,
            extra_body=self._body,
        )

    def start(self, file: Any) -> Any:
        return self._api.batches.create(
            input_file_id=file.id,
            endpoint=CHAT,
            completion_window="24h",
            metadata={"team": "search"},
            extra_body=self._body,
        )

    def ended(self, batch: Any) -> Any:
        deadline = time.monotonic() + TIMEOUT_S
        while batch.status not in ENDED:
            assert time.monotonic() < deadline, batch
            time.sleep(0.2)
            batch = self._api.batches.retrieve(batch.id, extra_query=self._query)
        return batch

    def content(self, file_id: str) -> bytes:
        return self._api.files.content(file_id, extra_query=self._query).content

    def run(self) -> None:
        """A batch from its upload to the end of its files."""
        api = self._api
        file = self.upload(short_lines(self._model))
        again = api.files.retrieve(file.id, extra_query=self._query)
        assert again.bytes == file.bytes, again
        assert self.content(file.id) == short_lines(self._model)
        batch = self.ended(self.start(file))
        assert batch.status == "completed", batch
        assert batch.metadata["team"] == "search", batch
        check_answers(self.content(batch.output_file_id), self._model)
        [error] = self.content(batch.error_file_id).splitlines()
        assert json.loads(error)["custom_id"] == "fails", error
        query = self._query or {"model": self._alias}
        listed = api.batches.list(limit=100, extra_query=query)
        assert listed.data, listed
        assert api.files.list(purpose="batch", extra_query=query).data
        assert api.files.delete(file.id, extra_query=self._query).deleted

    def cancel(self) -> None:
        """A batch that is cancelled."""
        batch = self.start(self.upload(long_lines(self._model)))
        batch = self._api.batches.cancel(batch.id, extra_body=self._body)
        assert batch.status in ("cancelling", "cancelled"), batch
        assert self.ended(batch).status == "cancelled"

    def refuse(self) -> None:
        """A batch that does not exist."""
        import openai

        provider = self._query or {"provider": "openai"}
        try:
            answer = self._api.batches.retrieve("batch_none", extra_query=provider)
        except openai.NotFoundError:
            return
        raise AssertionError(f"not refused: {answer}")

    def chat(self) -> None:
        """A single call, which goes to the same server."""
        answer = self._api.chat.completions.create(
            model=self._alias,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=4,
        )
        assert answer.usage is not None and answer.usage.completion_tokens > 0, answer


@contextmanager
def proxy(url: str, model: str) -> Iterator[str]:
    """LiteLLM's proxy with one deployment for each provider."""
    config = {
        "model_list": [
            {
                "model_name": f"ours-{provider}",
                "litellm_params": {
                    "model": f"{provider}/{model}",
                    "api_base": f"{url}/proxy/v1",
                    "api_key": "none",
                },
            }
            for provider in PROVIDERS
        ],
        "files_settings": [
            {
                "custom_llm_provider": provider,
                "api_base": f"{url}/proxy/v1",
                "api_key": "none",
            }
            for provider in PROVIDERS
        ],
        "general_settings": {"master_key": MASTER_KEY},
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="litellm-") as scratch:
        path = Path(scratch, "config.yaml")
        path.write_text(json.dumps(config))  # JSON is YAML
        with open(Path(scratch, "log"), "wb") as log:
            process = subprocess.Popen(
                [
                    *(str(Path(sys.executable).parent / "litellm"), "--config"),
                    *(str(path), "--host", "127.0.0.1", "--port", str(port)),
                ],
                stdout=log, stderr=subprocess.STDOUT,
                env={
                    **os.environ, **ENVIRONMENT, "OPENAI_API_KEY": "none",
                    # Retrieving, listing and cancelling by provider has no other address.
                    "OPENAI_BASE_URL": f"{url}/proxy/v1",
                },
            )  # fmt: skip
        try:
            here = f"http://127.0.0.1:{port}"
            wait_until_ready(process, here, Path(scratch, "log"))
            yield here
        finally:
            process.terminate()
            process.wait(timeout=30)


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health/liveliness", timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    raise RuntimeError(f"the proxy did not start: {log.read_text()[-3000:]}")


def checks_of_library(url: str, model: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    for provider in PROVIDERS:
        for is_async in (False, True):
            library = Library(url, model, provider, is_async=is_async)
            for check in ("run", "cancel", "refuse"):
                yield library.named(check), partial(run_async, getattr(library, check))


def run_async(check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(check())


def checks_of_proxy(url: str, model: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    for provider in PROVIDERS:
        alias = f"ours-{provider}"
        ways = {
            "model": {"headers": {"x-litellm-model": alias}},
            "provider": {
                "body": {"custom_llm_provider": provider},
                "query": {"provider": provider, "custom_llm_provider": provider},
            },
        }
        for way, named in ways.items():
            client = Proxy(url, model, alias, named)
            for name in ("run", "cancel", "refuse", "chat"):
                yield f"proxy-{provider}-{way}-{name}", getattr(client, name)


def main(url: str, model: str) -> None:
    outcomes: dict[str, str | None] = {}

    def run(checks: Iterator[tuple[str, Callable[[], Any]]]) -> None:
        for name, check in checks:
            outcomes[name] = None
            try:
                check()
            except Exception as error:
                outcomes[name] = f"{type(error).__name__}: {error}"[:600]
                traceback.print_exc()
            print(f"{name}: {outcomes[name] or 'ok'}"[:300], file=sys.stderr)

    run(checks_of_library(url, model))
    with proxy(url, model) as here:
        run(checks_of_proxy(here, model))
    print(json.dumps(outcomes))


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main(*sys.argv[1:])
