"""Traces at a real collector: of a server, of a front before it, and of ``run``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from batches import client, jsonl, line, wait
from free_ports import free_port
from openai.types import Batch
from otlp_collector import Collector, Span, children, collecting
from servers import SERVER_ARGS, Server, kill_group, server, wait_until_ready

from sglang_batch.job.traces import MOST_LINES

COMPLETIONS = "/v1/completions"
CALLER = "c0ffee0123456789"


@dataclass
class Traced:
    """A server and a front before it, which export over HTTP."""

    engine: Server
    front: Server
    collector: Collector
    exit: ExitStack  # stops the collector


@pytest.fixture(scope="module")
def traced(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Traced]:
    directory = tmp_path_factory.mktemp("traces")
    with ExitStack() as stack, ExitStack() as of_collector:
        collector = of_collector.enter_context(collecting())
        # Names of services tell where a span was made.
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        engine = stack.enter_context(
            server(
                demo_model,
                "--offline-batch",
                f"--offline-batch-dir={directory / 'engine'}",
                log_dir=directory,
                env={**env, "OTEL_SERVICE_NAME": "engine"},
            )
        )
        port, log_path = free_port(), directory / "front.log"
        command = [
            *(sys.executable, "-m", "sglang_batch", "serve", f"--port={port}"),
            f"--workers={engine.url}",
            f"--offline-batch-dir={directory / 'front'}",
        ]
        with open(log_path, "wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **env, "OTEL_SERVICE_NAME": "front"},
            )
        stack.callback(kill_group, process)
        front = Server(process, f"http://127.0.0.1:{port}", log_path)
        wait_until_ready(front)
        yield Traced(engine, front, collector, of_collector)


def lines(number: int, max_tokens: int = 3) -> bytes:
    return jsonl(
        line(
            f"line-{n}", {"prompt": f"Once {n}", "max_tokens": max_tokens}, COMPLETIONS
        )
        for n in range(number)
    )


def run_batch(url: str, number: int, *, flags: str = "01") -> tuple[str, Batch]:
    """A batch that a caller in a trace has made. Returns the trace's id, too."""
    trace = uuid.uuid4().hex
    return trace, wait(client(url), make_batch(url, trace, lines(number), flags).id)


def make_batch(url: str, trace: str, content: bytes, flags: str = "01") -> Batch:
    api = client(url)
    file = api.files.create(file=("input.jsonl", content), purpose="batch")
    return api.batches.create(
        input_file_id=file.id,
        endpoint=COMPLETIONS,
        completion_window="24h",
        extra_headers={"traceparent": f"00-{trace}-{CALLER}-{flags}"},
    )  # type: ignore[call-overload]


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def has_ended(spans: list[Span]) -> bool:
    return bool(named(spans, "batch") or named(spans, "run"))


def of_requests(spans: list[Span]) -> list[Span]:
    """SGLang's spans of whole requests."""
    return [span for span in spans if span.attributes.get("rid")]


def spans_of_batch(traced: Traced, url: str) -> tuple[Batch, list[Span]]:
    """A batch of three lines, and all spans of its trace."""
    trace, batch = run_batch(url, 3)
    assert batch.status == "completed"
    # The scheduler has exporters of its own, and a front is another process than its engine.
    return batch, traced.collector.until(
        trace,
        lambda spans: (
            has_ended(spans)
            and len(named(spans, "decode_forward")) == 3
            and len(of_requests(spans)) == 3
        ),
    )


def test_a_batch_is_a_tree_below_its_caller(traced: Traced) -> None:
    batch, spans = spans_of_batch(traced, traced.engine.url)
    assert {span.service for span in spans} == {"engine"}
    [root] = named(spans, "batch")
    assert root.parent == CALLER and not root.is_error
    assert root.attributes["sglang_batch.id"] == batch.id
    assert batch.usage is not None
    assert root["model"] == "demo" and root["total"] == root["completed"] == 3
    assert root["input_tokens"] == batch.usage.input_tokens
    assert root["cached_tokens"] == batch.usage.input_tokens_details.cached_tokens
    assert root["output_tokens"] == batch.usage.output_tokens == 9
    steps = [span.name for span in children(spans, root)]
    assert sorted(steps) == ["dispatch", "finish", "plan", "render", "validate", "wait"]
    [plan] = named(spans, "plan")
    assert (plan["policy"], plan["requests"]) == ("dfs", 3)
    [dispatch] = named(spans, "dispatch")
    sent = named(children(spans, dispatch), "line")
    assert sorted(span["custom_id"] for span in sent) == ["line-0", "line-1", "line-2"]
    for span in sent:
        assert (span["status_code"], span["output_tokens"]) == (200, 3)
        [request] = children(spans, span)
        assert request.attributes["rid"].endswith(f"-{span['number']:08d}")
        threads = children(spans, request)
        below = {each.name for thread in threads for each in children(spans, thread)}
        assert {"tokenize", "prefill_forward", "decode_forward"} <= below
        # Not one for each token.
        assert "decode_loop" not in {each.name for each in spans}


@pytest.mark.parametrize("place", ["engine", "front"])
def test_few_lines_of_a_large_batch_have_spans(traced: Traced, place: str) -> None:
    before = len(traced.collector.spans)
    number = 2 * MOST_LINES + 50
    trace, batch = run_batch(getattr(traced, place).url, number)
    assert batch.status == "completed"
    few = range(0, number, 3)
    spans = traced.collector.until(
        trace,
        lambda spans: (
            has_ended(spans) and len(named(spans, "decode_forward")) == len(few)
        ),
    )
    assert {span["number"] for span in named(spans, "line")} == set(few)
    assert len(of_requests(spans)) == len(few)
    # Nor are the others in traces of their own.
    assert len(of_requests(traced.collector.spans[before:])) == len(few)


def test_a_caller_decides_whether_it_is_sampled(traced: Traced) -> None:
    trace, batch = run_batch(traced.engine.url, 3, flags="00")
    assert batch.status == "completed"
    later, _ = run_batch(traced.engine.url, 1)
    traced.collector.until(later, has_ended)
    assert traced.collector.of(trace) == []
    requests = of_requests(traced.collector.spans)
    job = batch.id.removeprefix("batch_")
    assert not [span for span in requests if job in span.attributes["rid"]]


def test_a_batch_that_does_not_complete_is_an_error(traced: Traced) -> None:
    url, trace = traced.engine.url, uuid.uuid4().hex
    batch = make_batch(url, trace, lines(200, max_tokens=2000))
    traced.engine.until_busy()
    client(url).batches.cancel(batch.id)
    assert wait(client(url), batch.id).status == "cancelled"
    [root] = named(traced.collector.until(trace, has_ended), "batch")
    assert (root.is_error, root.status) == (True, "cancelled")
    assert root.events == ["cancelled"]
    trace = uuid.uuid4().hex
    failed = wait(client(url), make_batch(url, trace, b"no line\n").id)
    assert failed.status == "failed"
    [root] = named(traced.collector.until(trace, has_ended), "batch")
    assert (root.is_error, root.status) == (True, "failed")


def test_a_front_and_its_workers_share_traces(traced: Traced) -> None:
    _, spans = spans_of_batch(traced, traced.front.url)
    [root] = named(spans, "batch")
    assert (root.service, root.parent) == ("front", CALLER)
    for sent in named(spans, "line"):
        [call] = children(spans, sent)
        assert (call.name, call.service) == ("fleet call", "front")
        assert call["worker"] == traced.engine.url
        [request] = children(spans, call)
        assert request.service == "engine" and request.attributes["rid"]
    assert len(named(spans, "line")) == 3


def test_waves_continue_the_trace_of_their_caller(traced: Traced) -> None:
    import urllib.request

    trace = uuid.uuid4().hex
    wave = {"requests": [{"text": "Once", "sampling_params": {"max_new_tokens": 2}}]}
    call = urllib.request.Request(
        f"{traced.engine.url}/offline_batch/wave",
        json.dumps(wave).encode(),
        {"traceparent": f"00-{trace}-{CALLER}-01", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(call) as answer:
        assert json.loads(answer.read())["status_code"] == 200
    spans = traced.collector.until(trace, of_requests)
    [dispatch] = named(spans, "dispatch")
    [sent] = named(spans, "line")
    [request] = of_requests(spans)
    assert dispatch.parent == CALLER
    assert (request.parent, sent.parent) == (sent.id, dispatch.id)


def test_a_collector_that_is_gone_costs_nothing(traced: Traced) -> None:
    """The last of the module: it stops the collector."""
    started = time.monotonic()
    run_batch(traced.engine.url, 60)
    with_collector = time.monotonic() - started
    traced.exit.close()
    for url in (traced.engine.url, traced.front.url):
        started = time.monotonic()
        _, batch = run_batch(url, 60)
        assert batch.status == "completed"
        assert time.monotonic() - started < 5 + 2 * with_collector
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 60


@pytest.mark.parametrize("is_there", [True, False])
def test_run_is_traced_with_the_flag_of_sglang(
    demo_model: Path, tmp_path: Path, is_there: bool
) -> None:
    """Over gRPC, and without a collector."""
    (tmp_path / "input.jsonl").write_bytes(lines(2))
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        if not is_there:
            stack.close()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "sglang_batch", "run"),
                *("-i", str(tmp_path / "input.jsonl")),
                *("-o", str(tmp_path / "output.jsonl"), f"--model-path={demo_model}"),
                *("--enable-trace", f"--otlp-traces-endpoint={collector.address}"),
                *SERVER_ARGS,
            ],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert len((tmp_path / "output.jsonl").read_text().splitlines()) == 2
        if not is_there:
            return
        [root] = named(collector.spans, "run")
        spans = collector.of(root.trace)
    assert (root.parent, root["total"], root["output_tokens"]) == ("", 2, 6)
    sent = {span.id for span in named(spans, "line")}
    assert {span.parent for span in of_requests(spans)} == sent
    assert len(sent) == 2
    # SGLang's own default: its flag was given.
    assert named(spans, "decode_loop")
