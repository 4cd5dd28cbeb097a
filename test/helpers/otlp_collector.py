"""A collector of OpenTelemetry traces, over HTTP and gRPC."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

WAIT_S = 60


@dataclass(frozen=True)
class Span:
    """A span as it was exported. Ids are in hexadecimal, ``parent`` is empty for a root."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    events: list[str]
    is_error: bool
    status: str

    def __getitem__(self, name: str) -> Any:
        """An attribute of ours."""
        return self.attributes[f"sglang_batch.{name}"]


@dataclass
class Collector:
    """What was exported so far. ``url`` is for HTTP, ``address`` for gRPC."""

    url: str = ""
    address: str = ""
    spans: list[Span] = field(default_factory=list)

    def of(self, trace: str) -> list[Span]:
        return [span for span in self.spans if span.trace == trace]

    def until(self, trace: str, holds: Callable[[list[Span]], Any]) -> list[Span]:
        """The spans of a trace once this holds for them."""
        deadline = time.monotonic() + WAIT_S
        while not holds(found := self.of(trace)):
            names = sorted({span.name for span in found})
            assert time.monotonic() < deadline, f"{len(found)} spans: {names}"
            time.sleep(0.1)
        return found

    def take(self, request: messages.ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            name = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_span(name, each) for each in scope.spans]


def children(spans: list[Span], parent: Span) -> list[Span]:
    return [span for span in spans if span.parent == parent.id]


def _values(attributes: Any) -> dict[str, Any]:
    found = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        found[each.key] = getattr(each.value, kind)
    return found


def _span(service: str, span: Any) -> Span:
    return Span(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        _values(span.attributes),
        [event.name for event in span.events],
        span.status.code == span.status.STATUS_CODE_ERROR,
        span.status.message,
    )


class _Servicer(service.TraceServiceServicer):  # type: ignore[misc]
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> Any:
        self._collector.take(request)
        return messages.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector until the block ends, and nobody at its ports after that."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            collector.take(messages.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    grpc_server = grpc.server(ThreadPoolExecutor(2))
    service.add_TraceServiceServicer_to_server(_Servicer(collector), grpc_server)
    collector.address = f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
    grpc_server.start()
    try:
        yield collector
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
        grpc_server.stop(None).wait()
