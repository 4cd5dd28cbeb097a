"""Requests of another program, passed on to a server and recorded, and sent again later."""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

TIMEOUT_S = 120
# Calls of these paths are recorded.
RECORDED = re.compile(r"/v1/(files|batches)\b")
LISTING = re.compile(r"/v1/(files|batches)(\?|$)")
# Ids that our server makes.
IDS = re.compile(r"\b(file-(?:output-|error-)?|batch_)([0-9a-f]{32})\b")
BOUNDARY = re.compile(r"boundary=([\w-]+)")
# Headers that are of one connection.
OF_CONNECTION = {"host", "connection", "content-length", "transfer-encoding"}
# And those that differ with the machine or the day.
DROPPED = OF_CONNECTION | {"user-agent", "authorization", "traceparent"}


class IdNames:
    """Names for ids, by the order in which they are first seen."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._numbers: defaultdict[str, int] = defaultdict(int)

    def see(self, answer: str) -> None:
        """Name the ids in an answer."""
        for found in IDS.finditer(answer):
            if found[0] not in self._names:
                self._numbers[found[1]] += 1
                self._names[found[0]] = f"<{found[1]}{self._numbers[found[1]]}>"

    def named(self, request: str) -> str:
        """A request with names for ids."""
        for real, name in self._names.items():
            request = request.replace(real, name)
        return request

    def real(self, request: str) -> str:
        """A request with the ids that were seen under these names."""
        for real, name in self._names.items():
            request = request.replace(name, real)
        return request


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A request as it was sent, and how it was answered.

    path: with the query. Ids are names, see :class:`IdNames`.
    outline: see :func:`outline_of`.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: str
    status: int
    outline: list[str]

    @property
    def is_listing(self) -> bool:
        """Whether the answer has ids of other programs, too."""
        return self.method == "GET" and bool(LISTING.match(self.path))

    @property
    def request(self) -> str:
        """What was sent. Equal for calls that are alike but for the numbers of ids."""
        sent = [self.method, self.path, self.headers, self.body]
        return re.sub(r"(?<=[-_])\d+>", "N>", json.dumps(sent))


def outline_of(answer: str) -> list[str]:
    """The keys of an object, or the custom ids of a file of results."""
    found = [json.loads(line) for line in answer.splitlines() if line.startswith("{")]
    if any("custom_id" in line for line in found):
        return sorted(line["custom_id"] for line in found)
    return sorted({key for line in found for key in line})


class RequestRecorder(ThreadingHTTPServer):
    """Passes ``/NAME/v1/...`` on as ``/v1/...``, and records it in the flow ``NAME``.

    Attributes:
        flows: the calls of each flow for files and batches, in order. Of equal ones in a row,
            which wait for a batch, the last.
    """

    daemon_threads = True

    def __init__(self, server: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.client = httpx.Client(base_url=server, timeout=TIMEOUT_S)
        self.flows: defaultdict[str, list[RecordedCall]] = defaultdict(list)
        self._names: defaultdict[str, IdNames] = defaultdict(IdNames)
        self._lock = threading.Lock()

    def record(self, flow: str, call: RecordedCall, answer: str) -> None:
        """Add a call to a flow."""
        with self._lock:
            names = self._names[flow]
            if not call.is_listing:
                names.see(answer)
            path, body = names.named(call.path), names.named(call.body)
            call = replace(call, path=path, body=body)
            calls = self.flows[flow]
            if calls and calls[-1].request == call.request:
                calls.pop()
            calls.append(call)

    def document(self) -> dict[str, list[dict[str, Any]]]:
        """All flows as JSON, each kind once, under the first of its names."""
        found: dict[str, list[dict[str, Any]]] = {}
        for name, calls in sorted(self.flows.items()):
            flow = [asdict(call) for call in calls]
            if flow not in found.values():
                found[name] = flow
        return found


@contextmanager
def recorded(server: str) -> Iterator[RequestRecorder]:
    """A recorder before the server with this URL."""
    recorder = RequestRecorder(server)
    thread = threading.Thread(target=recorder.serve_forever, daemon=True)
    thread.start()
    try:
        yield recorder
    finally:
        recorder.shutdown()
        recorder.server_close()
        recorder.client.close()


def calls_of(flow: Iterable[dict[str, Any]]) -> list[RecordedCall]:
    """The calls of a flow in a document."""
    return [RecordedCall(**call) for call in flow]


class _Handler(BaseHTTPRequestHandler):
    server: RequestRecorder
    protocol_version = "HTTP/1.1"

    def pass_on(self) -> None:
        flow, _, rest = self.path.removeprefix("/").partition("/")
        path, body = f"/{rest}", b"".join(self._body())
        headers = {name.lower(): value for name, value in self.headers.items()}
        sent = {k: v for k, v in headers.items() if k not in OF_CONNECTION}
        answer = self.server.client.request(
            self.command, path, headers=sent, content=body
        )
        if RECORDED.match(path):
            kept = {
                k: v
                for k, v in sorted(sent.items())
                if k not in DROPPED and not k.startswith("x-stainless-")
            }
            text = body.decode()
            if boundary := BOUNDARY.search(kept.get("content-type", "")):
                text = text.replace(boundary[1], "boundary")
                kept["content-type"] = "multipart/form-data; boundary=boundary"
            call = RecordedCall(
                self.command, path, kept, text,
                answer.status_code, outline_of(answer.text),
            )  # fmt: skip
            self.server.record(flow, call, answer.text)
        self.send_response(answer.status_code)
        for name, value in answer.headers.items():
            if name.lower() not in {*OF_CONNECTION, "content-encoding"}:
                self.send_header(name, value)
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    do_GET = do_POST = do_DELETE = pass_on

    def _body(self) -> Iterator[bytes]:
        if self.headers.get("transfer-encoding") != "chunked":
            yield self.rfile.read(int(self.headers.get("content-length") or 0))
            return
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def log_message(self, *args: Any) -> None:
        """Nothing."""
