"""A web server on the loopback interface that keeps files in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WebFiles(ThreadingHTTPServer):
    """Files by path, for GET and PUT.

    Attributes:
        files: contents by path, without the query.
        log: (method, path with its query) of every request.
        failing: statuses that the next requests are answered with.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.log: list[tuple[str, str]] = []
        self.failing: list[int] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: WebFiles

    def do_GET(self) -> None:
        data = self.server.files.get(self.path.partition("?")[0])
        self._answer("GET", 200 if data is not None else 404, data or b"")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.server.failing:
            self.server.files[self.path.partition("?")[0]] = data
        self._answer("PUT", 200, b"")

    def _answer(self, method: str, status: int, data: bytes) -> None:
        failing = self.server.failing
        self.server.log.append((method, self.path))
        if failing:
            status, data = failing.pop(0), b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def web_files() -> Iterator[WebFiles]:
    """A running server."""
    with WebFiles() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
