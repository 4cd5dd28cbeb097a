"""The checks of ``sglang-batch serve`` before SGLang is imported."""

from __future__ import annotations

import json
import socket
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port

from sglang_batch.errors import ConfigError, StoreError
from sglang_batch.fleet.http_fleet import served_model
from sglang_batch.run import serve_command
from sglang_batch.run.fleet_options import WorkerOptions
from sglang_batch.run.serve_command import check_server, serve
from sglang_batch.server.http import front_server


def test_a_port_that_may_be_in_a_file_is_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(serve_command, "DEFAULT_PORT", taken.getsockname()[1])
        check_server(Namespace())  # with --config
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(StoreError, match="is in use"):
            check_server(Namespace(model_path=str(tmp_path)))


@contextmanager
def naming(model: str) -> Iterator[str]:
    """The URL of a server that does nothing but name its model."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": model}]}).encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _noting(served: list[tuple[Any, ...]]) -> Any:
    async def serve(*given: Any) -> None:
        served.append(given)

    return serve


def test_the_front_gets_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[Any, ...]] = []
    monkeypatch.setattr(front_server, "serve", _noting(served))
    port = free_port()
    options = [
        *("--host", "127.0.0.1", "--port", str(port), "--api-key", "client"),
        *("--offline-batch-dir", str(tmp_path / "batches"), "--enable-metrics"),
        *("--offline-batch-config", '{"max_batches": 3}', "--ssl-keyfile", "key.pem"),
    ]
    with naming("demo") as one, naming("demo") as two:
        fleet = WorkerOptions(argv=tuple(options), urls=(one, two), api_key="admin")
        assert serve(fleet) == 0
    ((*workers, found, directory, config),) = served
    assert workers == [(one, two), "admin"]
    assert (found.host, found.port) == ("127.0.0.1", port)
    assert (found.api_key, found.admin_api_key) == ("client", None)
    assert (found.enable_metrics, found.ssl_keyfile) == (True, "key.pem")
    assert directory == tmp_path / "batches"
    assert config.max_batches == 3


@pytest.mark.parametrize("away_first", [True, False])
def test_a_front_starts_with_the_servers_that_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away_first: bool
) -> None:
    served: list[tuple[Any, ...]] = []
    monkeypatch.setattr(front_server, "serve", _noting(served))
    argv = (f"--port={free_port()}", f"--offline-batch-dir={tmp_path}")
    away = f"http://127.0.0.1:{free_port()}"
    with naming("demo") as one:
        urls = (away, one) if away_first else (one, away)
        assert serve(WorkerOptions(argv=argv, urls=urls, api_key=None)) == 0
        assert served[0][0] == urls
        # A job needs all of its servers.
        with pytest.raises(ConfigError, match=f"{away} does not answer"):
            served_model(urls, None)


def test_servers_of_different_models_are_refused(tmp_path: Path) -> None:
    options = [f"--port={free_port()}", f"--offline-batch-dir={tmp_path}"]
    with naming("demo") as one, naming("other") as two:
        fleet = WorkerOptions(argv=tuple(options), urls=(one, two), api_key=None)
        with pytest.raises(ConfigError, match=f"{two} serves other; all workers"):
            serve(fleet)
