"""Spans of batches over an engine without a GPU, and what the environment asks for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from batch_service import batch_row, running_service, submit, until_over
from builders import make_lines
from fake_engine import FakeEngine
from opentelemetry import propagate, trace
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sglang_batch.job import traces
from sglang_batch.request import RequestOutput

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALL = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def ids(span: ReadableSpan) -> tuple[str, str | None]:
    """The ids of its trace and of its parent."""
    assert span.context is not None
    parent = None if span.parent is None else f"{span.parent.span_id:016x}"
    return f"{span.context.trace_id:032x}", parent


def is_sampled(headers: dict[str, str]) -> bool:
    return bool(int(headers["traceparent"].rpartition("-")[2], 16) & 1)


def test_a_restarted_batch_stays_in_the_trace_of_its_call(
    tmp_path: Path, exported: InMemorySpanExporter
) -> None:
    async def made() -> str:
        traces.enter(CALL)
        async with running_service(tmp_path, engine := FakeEngine()) as service:
            engine.hold(["r1"])
            batch_id = submit(service, make_lines(2))
            await engine.until_stalled(1, 1)
            return batch_id

    async def resumed(batch_id: str) -> None:
        async with running_service(tmp_path) as service:
            assert (await until_over(service, batch_id))["status"] == "completed"
            row = batch_row(service, batch_id)
            assert "vendor=1" in row["trace_context"]

    asyncio.run(resumed(asyncio.run(made())))
    first, second = named(exported, "batch")
    assert ids(first) == ids(second) == (TRACE, CALLER)
    assert (
        second.attributes is not None and second.attributes["sglang_batch.total"] == 2
    )
    assert {ids(span)[0] for span in exported.get_finished_spans()} == {TRACE}


def test_the_sampler_of_the_environment_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    exporter, seen = InMemorySpanExporter(), []
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)

    class Noting(FakeEngine):
        async def execute(
            self, prepared: Any, replica: int | None = None
        ) -> RequestOutput:
            seen.append(is_sampled(traces.headers()))
            return await super().execute(prepared, replica)

    async def scenario() -> None:
        async with running_service(tmp_path, Noting()) as service:
            row = await until_over(service, submit(service, make_lines(3)))
            assert row["status"] == "completed"

    asyncio.run(scenario())
    # SGLang is told, too.
    assert seen == [False] * 3 and not exporter.get_finished_spans()


def test_a_repeated_call_gets_the_first_batch(
    tmp_path: Path, exported: InMemorySpanExporter
) -> None:
    async def scenario() -> None:
        async with running_service(tmp_path) as service:
            first = submit(service, make_lines(1), same_since=0)
            traces.enter(CALL)
            file_id = batch_row(service, first)["input_file_id"]
            again = service.create_batch(
                file_id, "/v1/chat/completions", "24h", None, same_since=0
            )
            assert again["id"] == first

    asyncio.run(scenario())


def test_outside_of_a_trace_only_roots_have_spans(
    exported: InMemorySpanExporter,
) -> None:
    async def scenario() -> None:
        async with traces.span("nothing"):
            assert traces.headers() == {}
        async with traces.span("root", root=True):
            async with traces.span("hidden", hides=True):
                traces.note(name="nowhere")
                assert not is_sampled(traces.headers())
                async with traces.span("below"):
                    pass
            async with traces.span("part"):
                traces.note(name="part")
                assert is_sampled(traces.headers())

    asyncio.run(scenario())
    part, root = exported.get_finished_spans()
    assert (part.name, root.name) == ("part", "root")
    assert part.attributes == {"sglang_batch.name": "part"}
    assert root.context is not None and ids(part)[1] == f"{root.context.span_id:016x}"
    assert not root.attributes


def test_headers_that_name_no_trace_end_one() -> None:
    async def scenario(headers: dict[str, str]) -> dict[str, str]:
        traces.enter(CALL)
        assert traces.headers() == CALL
        traces.enter(headers)
        return traces.headers()

    bad = [{}, {"traceparent": "00-1"}, {"traceparent": f"00-{'0' * 32}-{CALLER}-01"}]
    for headers in bad:
        assert asyncio.run(scenario(headers)) == {}


ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
HTTP = "http/protobuf"


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"OTEL_SERVICE_NAME": "batches"}, None),
        ({ENDPOINT: "http://collector:4317"}, "otlp_proto_grpc"),
        ({TRACES_ENDPOINT: "http://collector:4317"}, "otlp_proto_grpc"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "otlp_proto_grpc"),
        ({ENDPOINT: "http://collector", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({ENDPOINT: "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, None),
        (
            {ENDPOINT: "http://collector", "OTEL_EXPORTER_OTLP_PROTOCOL": HTTP},
            "otlp_proto_http",
        ),
        (
            {
                ENDPOINT: "http://collector",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": HTTP,
            },
            "otlp_proto_http",
        ),
    ],
)
def test_the_environment_asks_for_traces(
    environment: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", dict(environment))
    exporter = traces.exporter()
    assert (None if exporter is None else exporter.name) == found


def test_without_the_packages_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(**_: Any) -> Sequence[Any]:
        return ()

    monkeypatch.setattr("os.environ", {ENDPOINT: "http://collector:4317"})
    monkeypatch.setattr(traces, "entry_points", none)
    assert traces.exporter() is None
    assert traces.provider(pytest.fail) is None
    assert not traces.start(pytest.fail)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "10s"}, "'10s'"),
        ({"OTEL_EXPORTER_OTLP_COMPRESSION": "zstd"}, '"zstd"'),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "10"}, "max_queue_size"),
        ({"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "many"}, "got many"),
    ],
)
def test_an_environment_that_cannot_be_used_makes_no_traces_and_ends_nothing(
    environment: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would end with an error when it makes the same."""
    for name, value in {ENDPOINT: "http://127.0.0.1:9", **environment}.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    assert not traces.start(said.append) and traces.provider(said.append) is None
    assert len(said) == 2
    assert all("OTEL_*" in each and reason in each for each in said)


def test_sglang_needs_both_exporters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {ENDPOINT: "http://127.0.0.1:9"})
    absent = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, absent, None)
    said: list[str] = []
    assert traces.provider(said.append) is None
    assert absent in said[0]


def test_propagators_that_are_not_installed_make_no_traces() -> None:
    """They end the import of OpenTelemetry's module, here in a process of its own."""
    program = """
from sglang_batch.job import traces
said = []
assert not traces.start(said.append)
traces.enter({"traceparent": "00-1"})
assert traces.headers() == {}
print(*said)
"""
    environment = {ENDPOINT: "http://127.0.0.1:9", "OTEL_PROPAGATORS": "b4"}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "Propagator b4 not found" in ended.stdout


def test_without_propagators_calls_begin_traces_of_their_own(
    exported: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``OTEL_PROPAGATORS=none``."""
    monkeypatch.setattr(propagate, "_HTTP_TEXT_FORMAT", CompositePropagator([]))

    async def scenario() -> None:
        traces.enter(CALL)
        async with traces.span("call", root=True):
            assert traces.headers() == {}

    asyncio.run(scenario())
    [call] = exported.get_finished_spans()
    assert ids(call)[1] is None


def test_propagators_that_are_not_installed_do_not_end_a_command() -> None:
    """FastAPI imports the module, too."""
    program = """
from sglang_batch.__main__ import main
try:
    main(["serve", "--workers", "http://127.0.0.1:9", "--port", "0"])
finally:
    import fastapi
    from sglang_batch.job import traces
    assert not traces.start(print)
"""
    environment = {ENDPOINT: "http://127.0.0.1:9", "OTEL_PROPAGATORS": "b4"}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    first, *_ = ended.stderr.splitlines()
    assert first.startswith("No traces: OTEL_PROPAGATORS is unusable (Propagator b4")
