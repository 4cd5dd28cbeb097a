"""Metrics of a server's batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from batch_service import (
    batch_row,
    make_service,
    running_service,
    submit,
    until_over,
)
from builders import CHAT, make_line, make_lines, run
from fake_engine import FakeEngine
from prometheus_client import CollectorRegistry, generate_latest

from sglang_batch.batch_api import protocol as api
from sglang_batch.config import OfflineBatchConfig
from sglang_batch.server import metrics
from sglang_batch.server import runner as runner_module
from sglang_batch.server.access.usage import add_usage
from sglang_batch.server.metrics import BatchMetrics, pause_kind, published
from sglang_batch.server.service import BatchService
from sglang_batch.server.webhooks import Webhooks


@pytest.fixture
def service(tmp_path: Path) -> Iterator[BatchService]:
    service = make_service(tmp_path)
    yield service
    service.store.close()


class Scraped:
    """A service's metrics, sampled on a test's request."""

    def __init__(self, service: BatchService) -> None:
        self.service = service
        self.registry = CollectorRegistry()
        self.metrics = BatchMetrics(service, registry=self.registry)

    def sample(self) -> None:
        run(self.metrics.sample())

    def __getitem__(self, key: tuple[str, ...]) -> float | None:
        """By name and, alternating, names and values of labels."""
        name, *labels = key
        named = dict(zip(labels[::2], labels[1::2], strict=True))
        return self.registry.get_sample_value(f"sglang_batch_{name}", named)


@pytest.fixture
def scraped(service: BatchService) -> Iterator[Scraped]:
    scraped = Scraped(service)
    yield scraped
    scraped.metrics.close()


def add(service: BatchService, batch_id: str, **fields: Any) -> None:
    row = {
        "id": batch_id,
        "status": api.IN_PROGRESS,
        "endpoint": CHAT,
        "input_file_id": "file-1",
        "completion_window": "24h",
        "created_at": 1000,
        "expires_at": 90_000,
        **fields,
    }
    service.store.insert("batches", row)


def test_counters_begin_where_the_server_does(scraped: Scraped) -> None:
    service = scraped.service
    add(service, "batch_old", status=api.COMPLETED, total=9, completed=9)
    add(service, "batch_1", total=10, completed=4, input_tokens=40)
    scraped.sample()
    completed = ("lines_total", "endpoint", CHAT, "outcome", "completed")
    assert not scraped[completed]
    service.store.update_batch(
        "batch_1", completed=6, failed=1, input_tokens=65, cached_tokens=5
    )
    scraped.sample()
    scraped.sample()
    assert scraped[completed] == 2
    assert scraped["lines_total", "endpoint", CHAT, "outcome", "failed"] == 1
    assert scraped["tokens_total", "kind", "input"] == 25
    assert scraped["tokens_total", "kind", "cached"] == 5
    assert scraped["lines_left",] == 3
    assert scraped["batches", "status", "completed"] == 1
    assert scraped["batches", "status", "in_progress"] == 1
    assert scraped["batches", "status", "expired"] == 0


def test_queued_tokens_are_those_of_the_lines_left(scraped: Scraped) -> None:
    service = scraped.service
    add(service, "batch_new", status=api.VALIDATING)
    scraped.sample()
    assert scraped["queued_tokens",] == 0
    work = service.store.work_dir("batch_new")
    work.mkdir()
    (work / "input.jsonl").write_bytes(b"x" * 400)
    scraped.sample()
    assert scraped["queued_tokens",] == 100
    tokens = {"input_tokens": 50, "output_tokens": 30}
    add(service, "batch_1", total=10, completed=3, failed=1, **tokens)
    waits = "server run from 22:00"
    add(service, "batch_2", total=10, completed=4, paused_reason=waits, **tokens)
    scraped.sample()
    assert scraped["queued_tokens",] == 100 + 6 * 80 / 4


def test_a_batch_that_came_and_went_between_two_samples_counts(
    scraped: Scraped,
) -> None:
    scraped.sample()
    add(
        scraped.service,
        "batch_1",
        status=api.EXPIRED,
        created_at=1000,
        in_progress_at=1003,
        expired_at=1100,
        total=10,
        completed=5,
        failed=2,
        line_errors=json.dumps({"line_timeout": 1, "odd": 1, "odder": 2}),
    )
    scraped.sample()
    scraped.sample()
    assert scraped["batches_ended_total", "status", "expired"] == 1
    assert scraped["lines_total", "endpoint", CHAT, "outcome", "expired"] == 3
    assert scraped["line_errors_total", "code", "line_timeout"] == 1
    assert scraped["line_errors_total", "code", "other"] == 3
    assert scraped["validation_seconds_sum",] == 3
    assert scraped["batch_seconds_sum",] == 100
    assert scraped["batch_seconds_count",] == 1


def test_lines_sent_again_count(scraped: Scraped) -> None:
    class Runner:
        num_retries = 0
        webhooks = Webhooks(scraped.service.store, OfflineBatchConfig(), lambda: True)

    scraped.service.runner = runner = cast(Any, Runner())
    for num_retries in (3, 5, 1, 2):  # it counts active batches only
        runner.num_retries = num_retries
        scraped.sample()
    assert scraped["line_retries_total",] == 6


def test_counts_that_fall_break_nothing(scraped: Scraped) -> None:
    add(scraped.service, "batch_1", total=10, completed=4)
    scraped.sample()
    for completed in (2, 3):  # a power cut took results
        scraped.service.store.update_batch("batch_1", completed=completed)
        scraped.sample()
    outcome = ("lines_total", "endpoint", CHAT, "outcome", "completed")
    assert scraped[outcome] == 1


def test_paused_batches_by_kind_of_reason(scraped: Scraped) -> None:
    reasons = [
        None,
        "Batches of this server run from 22:00-06:00 only.",
        "Results cannot be written: no space left",
        "the moon",
    ]
    for i, reason in enumerate(reasons):
        add(scraped.service, f"batch_{i}", paused_reason=reason)
    scraped.sample()
    for kind in ("hours", "disk", "other"):
        assert scraped["batches_paused", "reason", kind] == 1


def test_a_batch_outside_of_its_hours_counts_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.002)
    monkeypatch.setattr(runner_module, "in_hours", lambda hours, minute: False)

    async def scenario() -> None:
        async with running_service(tmp_path, batch_hours="01:00-02:00") as service:
            batch_id = submit(service, make_lines(1))
            while not (reason := batch_row(service, batch_id)["paused_reason"]):
                await asyncio.sleep(0.002)
            assert pause_kind(reason) == "hours"

    run(scenario())


def test_of_two_processes_one_publishes_and_the_other_takes_over(
    scraped: Scraped,
) -> None:
    other = Scraped(scraped.service)
    add(scraped.service, "batch_1", total=10)
    for each in (scraped, other):
        each.sample()
    scraped.service.store.update_batch("batch_1", completed=3)
    for each in (scraped, other):
        each.sample()
    outcome = ("lines_total", "endpoint", CHAT, "outcome", "completed")
    assert (scraped[outcome], other[outcome]) == (3, None)
    scraped.metrics.close()
    scraped.service.store.update_batch("batch_1", completed=5)
    other.sample()
    assert other[outcome] == 2
    other.metrics.close()


def test_bytes_are_those_of_the_files(tmp_path: Path, scraped: Scraped) -> None:
    (scraped.service.store.directory / "files" / "file-1").write_bytes(b"12345")
    scraped.service.store.record_file("file-1", "a.jsonl", "batch", None)
    scraped.sample()
    assert scraped["stored_bytes",] == 5


def test_a_service_at_work_is_published_only_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.002)
    registry, silent = CollectorRegistry(), CollectorRegistry()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"sglang_batch_{name}", labels)

    async def scenario() -> None:
        engine = FakeEngine(failing={"fails": 400})
        async with (
            running_service(tmp_path, engine) as service,
            published(service, False, registry=silent),
            published(service, registry=registry, every_s=0.02),
        ):
            while value("batches", status="completed") is None:
                await asyncio.sleep(0.002)
            batch_id = submit(service, [*make_lines(3), make_line("fails")])
            row = await until_over(service, batch_id)
            while not value("batches_ended_total", status="completed"):
                await asyncio.sleep(0.002)
            for outcome in ("completed", "failed"):
                lines = value("lines_total", endpoint=CHAT, outcome=outcome)
                assert lines == row[outcome]
            assert value("tokens_total", kind="output") == row["output_tokens"] > 0

    run(scenario())
    assert generate_latest(silent) == b""


def test_every_metric_has_a_help_text_and_no_label_is_free(scraped: Scraped) -> None:
    scraped.sample()
    for metric in scraped.registry.collect():
        assert metric.documentation.endswith(".")
        assert metric.name.startswith("sglang_batch_")
        assert set(metric.samples[0].labels if metric.samples else {}) <= {
            "status",
            "endpoint",
            "outcome",
            "code",
            "kind",
            "reason",
            "le",
        }


def test_usage_of_keys_has_a_bounded_label(
    service: BatchService, scraped: Scraped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MAX_NAMES", 2)
    add_usage(service.store, "before", batches=5)
    scraped.sample()
    for name in ("ann", "bob", "eve", "dan"):
        add_usage(service.store, name, batches=1, input_tokens=7, output_tokens=2)
    scraped.sample()
    add_usage(service.store, "ann", batches=1)
    scraped.sample()
    batches = [
        scraped["key_batches_total", "key", name]
        for name in ("ann", "bob", metrics.OTHER_NAMES, "dan", "eve", "before")
    ]
    # The first two in order of their names.
    assert batches == [2, 1, 2, None, None, None]
    assert scraped["key_tokens_total", "key", "ann", "kind", "input"] == 7
