"""OpenAI's client through LiteLLM's proxy, with the server as its deployments."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checks as c
import openai
from checks import check

PROVIDERS = ("openai", "hosted_vllm")
MASTER_KEY = "sk-benchmark"
SERVER: Any = {"api_base": f"{c.SETTINGS['recorder_url']}/proxy/v1", "api_key": c.KEY}
# Retrieving, listing and cancelling by provider has no other address. What starts at once
# and calls home where it can is told not to.
ENVIRONMENT = {
    "OPENAI_BASE_URL": SERVER["api_base"],
    "OPENAI_API_KEY": c.KEY,
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_POLICY_TEMPLATES": "True",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_TELEMETRY": "False",
    "NO_PROXY": "127.0.0.1",
}


class Named:
    """Calls of a deployment, named by the header ``x-litellm-model`` or by the provider."""

    def __init__(self, url: str, provider: str, *, by_provider: bool) -> None:
        at: Any = {"base_url": f"{url}/v1", "api_key": MASTER_KEY, "max_retries": 0}
        self._api: Any = openai.OpenAI(**at, timeout=120)
        self._alias = f"ours-{provider}"
        self._sent: Any = {"extra_headers": {"x-litellm-model": self._alias}}
        self._body: Any = {}
        self._query: Any = {}
        if by_provider:
            named = {"custom_llm_provider": provider}
            self._sent = self._body = {"extra_body": named}
            self._query = {"extra_query": {"provider": provider, **named}}

    def start(self, content: bytes) -> str:
        named = ("questions.jsonl", content)
        file = self._api.files.create(file=named, purpose="batch", **self._sent)
        of: Any = {"input_file_id": file.id, "endpoint": c.CHAT}
        of["completion_window"] = "24h"
        return str(self._api.batches.create(**of, **self._body).id)

    def fetch(self, batch: str) -> Any:
        return self._api.batches.retrieve(batch, **self._query)

    def cancel(self, batch: str) -> Any:
        return self._api.batches.cancel(batch, **self._body)

    def content(self, file: str) -> bytes:
        found: bytes = self._api.files.content(file, **self._query).content
        return found

    def ask(self, **more: Any) -> Any:
        asked: Any = {"model": self._alias, **c.ASKED}
        return self._api.chat.completions.create(**asked | more)


@contextmanager
def proxy() -> Iterator[str]:
    """LiteLLM's proxy with a deployment for each provider. Yields its URL."""
    of = {name: {"model": f"{name}/{c.MODEL}", **SERVER} for name in PROVIDERS}
    config = {
        "model_list": [
            {"model_name": f"ours-{name}", "litellm_params": of[name]} for name in of
        ],
        "files_settings": [{"custom_llm_provider": name, **SERVER} for name in of],
        "general_settings": {"master_key": MASTER_KEY},
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="litellm-") as scratch:
        path, log = Path(scratch, "config.yaml"), Path(scratch, "log")
        path.write_text(json.dumps(config))  # JSON is YAML
        command = [str(Path(sys.executable).parent / "litellm"), "--config", str(path)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", port],
                stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT},
            )  # fmt: skip
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=30)


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + c.PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health/liveliness", timeout=5):
                return
        except OSError:
            time.sleep(c.POLL_S)
    raise RuntimeError(f"the proxy did not start: {log.read_text()[-3000:]}")


with proxy() as here:
    for provider in PROVIDERS:
        for by_provider in (False, True):
            each = Named(here, provider, by_provider=by_provider)
            check("chat")(each.ask)
            c.check_results(each.start, each.fetch, each.content)
            c.check_batches(
                each.start, each.fetch, each.cancel, None, openai.NotFoundError
            )
    c.report("litellm")
