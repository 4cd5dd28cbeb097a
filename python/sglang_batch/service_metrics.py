"""Prometheus metrics of a server's batches, beside those that SGLang has.

What they show is read from the store every few seconds, so it does not matter which
process of the server runs the batches. Of all processes one publishes; what it writes
is in SGLang's ``/metrics``, whichever process answers there. Counters count what
happened since the server started; labels have few values, never an id or a name.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from .batch_api import protocol as api
from .service import BatchService
from .service_sample import StoreSample
from .store.batch_store import Row
from .store.lock import FileLock

logger = logging.getLogger(__name__)

PREFIX = "sglang_batch_"
SAMPLE_EVERY_S = 5.0

STATUSES = (*api.ACTIVE_STATUSES, api.COMPLETED, api.FAILED, api.CANCELLED, api.EXPIRED)
TOKEN_KINDS = ("input", "cached", "output", "reasoning")
# Codes, or else types, of error lines that have a label of their own.
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
# Kinds of reasons for which a batch does not go on, by words of the reason.
PAUSE_KINDS = {"server run from": "hours", "cannot be written": "disk"}
OTHER = "other"

_VALIDATION_BUCKETS_S = (1, 2, 5, 10, 30, 60, 300, 1800)
_BATCH_BUCKETS_S = (10, 60, 300, 900, 3600, 10_800, 43_200, 86_400, 604_800)
_NEW: Row = {
    "completed": 0,
    "failed": 0,
    **{f"{kind}_tokens": 0 for kind in TOKEN_KINDS},
    "line_errors": None,
    "in_progress_at": None,
}


class ServiceMetrics:
    """Reads the store and sets the metrics; one for a process.

    Args:
        service: whose batches they are.
        registry: prometheus_client's, if not its default one.

    Raises:
        ValueError: the registry has these metrics already.
    """

    def __init__(self, service: BatchService, *, registry: Any = None) -> None:
        self._service = service
        self._turn = FileLock(service.store.directory / "metrics.lock")
        self._newest_seq: int | None = None
        # By seq, the batches that were active when last looked at, as they were then.
        self._active: dict[int, Row] = {}
        self._num_retries = 0
        self._make_metrics(registry)

    def _make_metrics(self, registry: Any) -> None:
        # SGLang sets PROMETHEUS_MULTIPROC_DIR before it starts its processes;
        # prometheus_client looks at it when it is imported.
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        where = REGISTRY if registry is None else registry

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(PREFIX + name, text, labels, registry=where)

        def gauge(name: str, text: str, *labels: str) -> Any:
            return Gauge(
                PREFIX + name,
                text,
                labels,
                registry=where,
                multiprocess_mode="mostrecent",
            )

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(PREFIX + name, text, registry=where, buckets=buckets)

        self._batches = gauge("batches", "Batches in the store, by status.", "status")
        self._paused = gauge(
            "batches_paused",
            "Batches in progress that do not go on, by kind of reason.",
            "reason",
        )
        self._lines_left = gauge(
            "lines_left", "Lines of batches not ended that have no result yet."
        )
        self._eta = gauge(
            "eta_seconds",
            "Estimated time until the running batches are done: that of the last "
            "one; 0 if none runs or nothing is known.",
        )
        self._stored_bytes = gauge(
            "stored_bytes",
            "Bytes of all files, of parts of uploads and of results not finished.",
        )
        self._ended = counter(
            "batches_ended", "Batches that ended, by status.", "status"
        )
        self._lines = counter(
            "lines",
            "Lines that came to an end, by endpoint and outcome: completed, failed, or "
            "never run because their batch expired or was cancelled.",
            "endpoint",
            "outcome",
        )
        self._line_errors = counter(
            "line_errors", "Lines with an error as result, by its code.", "code"
        )
        self._retries = counter(
            "line_retries", "Lines sent again after a transient error."
        )
        self._tokens = counter(
            "tokens",
            "Tokens of batches' answered lines by kind. Cached ones are among the "
            "input, reasoning ones among the output; cached over input is the cached "
            "share.",
            "kind",
        )
        self._validation = histogram(
            "validation_seconds",
            "Time from a batch's creation until its input was found valid.",
            _VALIDATION_BUCKETS_S,
        )
        self._duration = histogram(
            "batch_seconds",
            "Time from a batch's creation until it ended.",
            _BATCH_BUCKETS_S,
        )

    async def sample(self) -> None:
        """Read the store and publish what changed, if it is this process's turn."""
        seen = await asyncio.to_thread(
            StoreSample, self._service.store, self._newest_seq, list(self._active)
        )
        self._count_retries()
        publishing = self._turn.acquire("metrics") is None
        # What was there when the server started is where counters begin.
        if publishing and self._newest_seq is not None:
            for row in seen.rows:
                self._count(self._active.get(row["seq"], _NEW), row)
        self._newest_seq = seen.newest_seq
        self._active = {
            row["seq"]: row for row in seen.rows if row["status"] in api.ACTIVE_STATUSES
        }
        if publishing:
            self._set_gauges(seen)

    def close(self) -> None:
        """Let another process publish."""
        self._turn.release()

    def _set_gauges(self, seen: StoreSample) -> None:
        for status in STATUSES:
            self._batches.labels(status).set(seen.num_by_status.get(status, 0))
        active = list(self._active.values())
        kinds = [pause_kind(row.get("paused_reason")) for row in active]
        for kind in {*PAUSE_KINDS.values(), OTHER}:
            self._paused.labels(kind).set(kinds.count(kind))
        self._lines_left.set(sum(map(_num_left, active)))
        self._eta.set(max(map(self._eta_s, active), default=0))
        self._stored_bytes.set(seen.stored_bytes)

    def _eta_s(self, row: Row) -> float:
        """Seconds that a batch still takes; 0 if nothing is known."""
        rate = self._service.history.rate(row["id"])
        return 0.0 if rate is None else rate.eta_s or 0.0

    def _count_retries(self) -> None:
        """Those of this process, which no other one knows."""
        runner = self._service.runner
        num_retries = 0 if runner is None else runner.num_retries
        _add(self._retries, num_retries - self._num_retries)
        self._num_retries = num_retries

    def _count(self, before: Row, row: Row) -> None:
        """Add to the counters what happened to a batch."""
        endpoint = row["endpoint"] if row["endpoint"] in api.ENDPOINTS else OTHER
        for outcome in ("completed", "failed"):
            _add(self._lines.labels(endpoint, outcome), row[outcome] - before[outcome])
        for kind in TOKEN_KINDS:
            key = f"{kind}_tokens"
            _add(self._tokens.labels(kind), row[key] - before[key])
        errors, errors_before = _line_errors(row), _line_errors(before)
        for code, num in errors.items():
            label = code if code in ERROR_CODES else OTHER
            _add(self._line_errors.labels(label), num - errors_before.get(code, 0))
        if row["in_progress_at"] and not before["in_progress_at"]:
            self._validation.observe(row["in_progress_at"] - row["created_at"])
        if row["status"] not in api.ACTIVE_STATUSES:
            self._count_end(row, endpoint)

    def _count_end(self, row: Row, endpoint: str) -> None:
        status = row["status"]
        self._ended.labels(status).inc()
        if status in (api.CANCELLED, api.EXPIRED):
            _add(self._lines.labels(endpoint, status), _num_left(row))
        ended_at = row.get(f"{status}_at")
        if ended_at:
            self._duration.observe(ended_at - row["created_at"])


def pause_kind(reason: str | None) -> str | None:
    """The kind of a reason for which a batch does not go on; None if it does."""
    if not reason:
        return None
    for word, kind in PAUSE_KINDS.items():
        if word in reason:
            return kind
    return OTHER


def _line_errors(row: Row) -> dict[str, int]:
    text = row.get("line_errors")
    errors: dict[str, int] = json.loads(text) if text else {}
    return errors


def _num_left(row: Row) -> int:
    left: int = row["total"] - row["completed"] - row["failed"]
    return max(0, left)


def _add(counter: Any, amount: int) -> None:
    # A counter refuses to fall; counts fall where a power cut took results.
    if amount > 0:
        counter.inc(amount)


@asynccontextmanager
async def published(
    service: BatchService,
    enabled: bool = True,
    *,
    registry: Any = None,
    every_s: float = SAMPLE_EVERY_S,
) -> AsyncIterator[None]:
    """Publish a service's metrics for the length of the block.

    Args:
        enabled: whether the server was started with --enable-metrics; nothing is
            published without.
    """
    if not enabled:
        yield
        return
    metrics = ServiceMetrics(service, registry=registry)
    over = asyncio.Event()
    work = asyncio.create_task(_keep(metrics, over, every_s))
    try:
        yield
    finally:
        # Not cancelled: a thread that reads the store must be done before it closes.
        over.set()
        await work
        metrics.close()


async def _keep(metrics: ServiceMetrics, over: asyncio.Event, every_s: float) -> None:
    while not over.is_set():
        try:
            await metrics.sample()
        except Exception:
            # A busy database, say; the next time will do.
            logger.exception("Reading the batches for their metrics failed")
        try:
            await asyncio.wait_for(over.wait(), every_s)
        except TimeoutError:
            continue
