"""Webhooks of a real server, which is killed while its receiver does not take them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from batches import client, jsonl, line, submit, wait
from openai.types.webhooks import BatchCompletedWebhookEvent
from servers import server

NEWEST = Path(sys.prefix) / "newest-openai"
SECRET = "whsec_C2FtcGxlIHNlY3JldCBvZiAzMiBieXRlcyEhISEhIQ=="
QUESTION = {"messages": [{"role": "user", "content": "What is a tuple?"}]}
UNWRAP = """
import json, sys, openai
headers, body, secret = json.load(sys.stdin)
event = openai.Client(api_key="none", webhook_secret=secret).webhooks.unwrap(body, headers)
print(openai.__version__, type(event).__name__, event.data.id)
"""


class Receiver(ThreadingHTTPServer):
    def __init__(self) -> None:
        self.status = 503
        self.calls: list[tuple[dict[str, str], str]] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.calls.append((dict(self.headers), body.decode()))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def receiving() -> Iterator[Receiver]:
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield receiver
        finally:
            receiver.shutdown()
            thread.join()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_event_of_a_killed_server_is_delivered_by_the_next(
    demo_model: Path, tmp_path: Path
) -> None:
    with receiving() as receiver:
        path = tmp_path / "webhooks"
        url = f"http://127.0.0.1:{receiver.server_port}/t0p"
        path.write_text(f"* {url} {SECRET}\n")
        settings = {"webhooks": str(path), "webhook_networks": ["127.0.0.0/8"]}
        args = (
            "--offline-batch",
            f"--offline-batch-dir={tmp_path / 'batches'}",
            f"--offline-batch-config={json.dumps(settings)}",
            "--enable-metrics",
        )
        with server(demo_model, *args, log_dir=tmp_path) as running:
            api = client(running.url)
            body = {**QUESTION, "max_tokens": 4}
            batch = wait(api, submit(api, jsonl([line("only", body)])).id)
            assert batch.status == "completed"
            until(lambda: receiver.calls)
            name = 'sglang_batch_webhook_attempts_total{outcome="failed"} 1.0'
            until(lambda: name in metrics(running.url))
            running.kill()
            log = running.log
        receiver.status = 204
        with server(demo_model, *args, log_dir=tmp_path) as running:
            until(lambda: len(receiver.calls) > 1)
            until(lambda: "sglang_batch_webhooks_pending 0.0" in metrics(running.url))
            time.sleep(2)
            log += running.log
    [first, second] = receiver.calls
    assert first[0]["webhook-id"] == second[0]["webhook-id"]
    assert first[1] == second[1]
    headers, text = second
    event = api.webhooks.unwrap(text, headers, secret=SECRET)
    assert isinstance(event, BatchCompletedWebhookEvent)
    assert event.data.id == batch.id
    assert f"{event.id} (batch.completed, {batch.id}) was not taken" in log
    # The newest client takes it, too.
    found = subprocess.run(
        [sys.executable, "-c", UNWRAP],
        input=json.dumps([headers, text, SECRET]),
        env={**os.environ, "PYTHONPATH": str(NEWEST)},
        capture_output=True,
        text=True,
        check=True,
    )
    kind = BatchCompletedWebhookEvent.__name__
    assert found.stdout.split() == ["3.54.0", kind, batch.id]
    for secret in (SECRET.removeprefix("whsec_"), "t0p"):
        assert secret not in log


def test_a_file_that_cannot_be_used_is_refused_at_once(
    demo_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "webhooks"
    path.write_text("* https://hooks.example.com/ t0psecret\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sglang_batch", "serve", "--port=0"),
            *(f"--model-path={demo_model}", f"--offline-batch-dir={tmp_path / 'b'}"),
            f"--offline-batch-config={json.dumps({'webhooks': str(path)})}",
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2, done.stderr
    assert f"{path}:1: a secret must be 'whsec_'" in done.stderr
    assert "t0psecret" not in done.stderr + done.stdout


def metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    return text
