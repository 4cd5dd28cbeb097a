"""Prometheus metrics of a server's batches, in addition to SGLang's own.

They are read from the store every few seconds, so it does not matter which process of
the server runs the batches. One process publishes them, and SGLang's ``/metrics`` has
them whichever process answers. Counters start from 0 with the server. Labels have few
values, never an id or a client's text.
"""

from __future__ import annotations

import collections
import json
import tomllib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ..batch_api import protocol as api
from ..store.batch_store import BatchStore, Row
from ..store.files import FileLock
from .access.usage import COUNTS, num_left, queued_tokens, usage_totals
from .background import Repeated, in_thread
from .service import BatchService

# The outcome of lines without an answer in a batch that had enough of them.
GIVEN_UP = "given_up"
PREFIX = "sglang_batch_"
SAMPLE_EVERY_S = 5.0

STATUSES = (*api.ACTIVE_STATUSES, api.COMPLETED, api.FAILED, api.CANCELLED, api.EXPIRED)
TOKEN_KINDS = ("input", "cached", "output", "reasoning")
# Error codes, or else types, that have a label of their own.
ERROR_CODES = (
    "api_error",
    "context_length_exceeded",
    "engine_died",
    "invalid_request_error",
    "line_timeout",
    "not_found_error",
    "overloaded_error",
    "rate_limit_error",
    "server_error",
)
# Why batches are paused, by words of the reason that their object gives.
PAUSE_KINDS = {
    "server run from": "hours",
    "cannot be written": "disk",
    "/pause_generation": "engine",
    "of its API key": "limit",
}
OTHER = "other"

_NEW: Row = {
    **dict.fromkeys(("completed", "failed", *(f"{k}_tokens" for k in TOKEN_KINDS)), 0),
    "line_errors": None,
    "in_progress_at": None,
}
# Arguments of prometheus_client, by kind and name.
METRICS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


class BatchMetrics:
    """Reads the store and sets the metrics. ValueError: the registry has them already."""

    def __init__(self, service: BatchService, *, registry: Any = None) -> None:
        self._service = service
        self._publisher = FileLock(service.store.directory / "metrics.lock")
        self._newest_seq: int | None = None
        # By seq, the batches that were active in the last sample, as they were then.
        self._active: dict[int, Row] = {}
        self._num_retries = 0
        self._webhooks = collections.Counter[str]()
        # SGLang sets PROMETHEUS_MULTIPROC_DIR before it starts its processes, and
        # prometheus_client reads it on import.
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        registry = REGISTRY if registry is None else registry
        kinds: dict[str, Any] = {
            "gauges": partial(Gauge, multiprocess_mode="mostrecent"),
            "counters": Counter,
            "histograms": Histogram,
        }
        self._gauges, self._counters, self._histograms = (
            {
                name: make(PREFIX + name, registry=registry, **each)
                for name, each in METRICS[kind].items()
            }
            for kind, make in kinds.items()
        )
        self._usage = UsageMetrics(self._counters)

    async def sample(self) -> None:
        """Read the store, and publish the changes if this process is the publisher."""
        store, first = self._service.store, self._newest_seq is None
        rows, self._newest_seq = await in_thread(
            store.changed_batches,
            api.ACTIVE_STATUSES,
            self._newest_seq,
            list(self._active),
        )
        # The retries and webhooks of this process, which are not in the store.
        runner = self._service.runner
        num_retries = 0 if runner is None else runner.num_retries
        self._add("line_retries", num_retries - self._num_retries)
        self._num_retries = num_retries
        attempts = runner.webhooks.attempts.copy() if runner else self._webhooks
        for outcome, number in (attempts - self._webhooks).items():
            self._add("webhook_attempts", number, outcome)
        self._webhooks = attempts
        publishing = self._publisher.acquire("metrics") is None
        await in_thread(self._usage.sample, store, publishing)
        # Counters leave out whatever happened before the server started.
        if publishing and not first:
            for row in rows:
                self._count(self._active.get(row["seq"], _NEW), row)
        self._active = {
            row["seq"]: row for row in rows if row["status"] in api.ACTIVE_STATUSES
        }
        if publishing:
            await in_thread(self._set_gauges, store)

    def close(self) -> None:
        """Let another process publish."""
        self._publisher.release()

    def _set_gauges(self, store: BatchStore) -> None:
        gauges = self._gauges
        by_status = "SELECT status, count(*) AS num FROM batches GROUP BY status"
        numbers = {row["status"]: row["num"] for row in store.rows(by_status)}
        for status in STATUSES:
            gauges["batches"].labels(status).set(numbers.get(status, 0))
        active = list(self._active.values())
        kinds = [pause_kind(row.get("paused_reason")) for row in active]
        for kind in {*PAUSE_KINDS.values(), OTHER}:
            gauges["batches_paused"].labels(kind).set(kinds.count(kind))
        gauges["lines_left"].set(sum(map(num_left, active)))
        running = (row for row in active if not row.get("paused_reason"))
        queued = (queued_tokens(store, row) for row in running)
        gauges["queued_tokens"].set(sum(queued))
        gauges["eta_seconds"].set(max(map(self._eta_s, active), default=0))
        gauges["stored_bytes"].set(store.bytes_stored())
        [pending] = store.rows("SELECT count(*) AS num FROM webhooks")
        gauges["webhooks_pending"].set(pending["num"])

    def _eta_s(self, row: Row) -> float:
        """Seconds until a batch is done, or 0 if unknown."""
        rate = self._service.history.rate(row["id"])
        return 0.0 if rate is None else rate.eta_s or 0.0

    def _count(self, before: Row, row: Row) -> None:
        endpoint = row["endpoint"] if row["endpoint"] in api.ENDPOINTS else OTHER
        for outcome in ("completed", "failed"):
            self._add("lines", row[outcome] - before[outcome], endpoint, outcome)
        for kind in TOKEN_KINDS:
            key = f"{kind}_tokens"
            self._add("tokens", row[key] - before[key], kind)
        errors, errors_before = _line_errors(row), _line_errors(before)
        for code, num in errors.items():
            label = code if code in ERROR_CODES else OTHER
            self._add("line_errors", num - errors_before.get(code, 0), label)
        if row["in_progress_at"] and not before["in_progress_at"]:
            seconds = row["in_progress_at"] - row["created_at"]
            self._histograms["validation_seconds"].observe(seconds)
        status = row["status"]
        if status not in api.ACTIVE_STATUSES:
            self._add("batches_ended", 1, status)
            # Of a completed batch, those that were given up once it had enough answers.
            outcome = GIVEN_UP if status == api.COMPLETED else status
            if status != api.FAILED:
                self._add("lines", num_left(row), endpoint, outcome)
            if ended_at := row.get(f"{status}_at"):
                seconds = ended_at - row["created_at"]
                self._histograms["batch_seconds"].observe(seconds)

    def _add(self, name: str, amount: int, *labels: str) -> None:
        counter = self._counters[name]
        counter = counter.labels(*labels) if labels else counter
        # A counter cannot fall, but counts do if a power cut lost results.
        counter.inc(max(0, amount))


def pause_kind(reason: str | None) -> str | None:
    """The kind of the reason for which a batch is paused, or None if it is not."""
    if not reason:
        return None
    for word, kind in PAUSE_KINDS.items():
        if word in reason:
            return kind
    return OTHER


def _line_errors(row: Row) -> dict[str, int]:
    text = row.get("line_errors")
    return json.loads(text) if text else {}


@asynccontextmanager
async def published(
    service: BatchService,
    enabled: bool = True,
    *,
    registry: Any = None,
    every_s: float = SAMPLE_EVERY_S,
) -> AsyncIterator[None]:
    """Publish a service's metrics during the block, with --enable-metrics."""
    if not enabled:
        yield
        return
    metrics = BatchMetrics(service, registry=registry)
    sampling = Repeated(metrics.sample, every_s, "Reading the batches for the metrics")
    sampling.start()
    try:
        yield
    finally:
        await sampling.stop()
        metrics.close()


# Names that have a label of their own. The others share one.
MAX_NAMES = 100
OTHER_NAMES = "(other)"
KEY_TOKEN_KINDS = ("input", "cached", "output")


class UsageMetrics:
    """Counters with the name of a key as a label."""

    def __init__(self, counters: Mapping[str, Any]) -> None:
        self._counters = counters
        self._before: dict[str, Row] | None = None
        self._labels: dict[str, str] = {}

    def sample(self, store: BatchStore, publish: bool) -> None:
        """Count the usage since the last sample, and publish it if this process does."""
        totals = usage_totals(store)
        if publish and self._before is not None:
            for name, row in totals.items():
                self._count(name, self._before.get(name, dict.fromkeys(COUNTS, 0)), row)
        self._before = totals

    def _count(self, name: str, before: Row, row: Row) -> None:
        grown = {count: max(0, row[count] - before[count]) for count in COUNTS}
        if not any(grown.values()):
            return
        full = len(self._labels) >= MAX_NAMES  # names are made by admins only
        label = self._labels.setdefault(name, OTHER_NAMES if full else name)
        for name in ("batches", "lines", "calls", "merged_tokens"):
            self._counters[f"key_{name}"].labels(label).inc(grown[name])
        for kind in KEY_TOKEN_KINDS:
            tokens = grown[f"{kind}_tokens"]
            self._counters["key_tokens"].labels(label, kind).inc(tokens)
        self._counters["key_engine_seconds"].labels(label).inc(grown["engine_s"])
