"""Prometheus metrics of the steps, beside those that SGLang has with --enable-metrics.

The names start with ``sglang_batch_`` and the labels are those of SGLang's scheduler
metrics (``model_name``, ``tp_rank``, ...); what is counted by side also has ``side``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..scheduling.step_record import COLUMNS, StepRecord

PREFIX = "sglang_batch_"
SIDES = ("left", "right", "online")
# Publishing costs many times what taking a record does: it is done once in so many.
PUBLISH_EVERY = 16

# By metric: the columns that it is the sum of or the last value of, and what it says.
_COUNTERS_BY_SIDE = {
    "prefill_tokens": ("prefill", "Prompt tokens computed."),
    "decode_tokens": ("decode", "Tokens decoded."),
}
_GAUGES_BY_SIDE = {
    "kv_tokens": ("kv", "Tokens of KV of running requests, without shared prefixes."),
}
_COUNTERS = {
    "cached_tokens": ("cached_tokens", "Prompt tokens found in the cache."),
    "evicted_tokens": ("evicted_tokens", "Tokens of KV dropped from the cache."),
    "parked": ("parked", "Requests set aside while they ran."),
    "resumed": ("resumed", "Parked requests that were taken up again."),
    "retracted": ("retracted", "Requests that gave their KV back while they ran."),
    "kv_read_bytes_saved": (
        "kv_saved_bytes",
        "Bytes of KV not read again because running requests share it.",
    ),
    "compute_seconds": ("compute_s", "Estimated compute time of the steps."),
    "memory_seconds": ("memory_s", "Estimated memory time of the steps."),
}
_GAUGES = {
    "kv_shared_tokens": ("kv_shared", "Tokens of shared prefixes in use."),
    "kv_cached_tokens": ("kv_cached", "Tokens of KV kept for later use."),
    "waiting_requests": ("waiting", "Requests in the backlog."),
}


class StepMetrics:
    """Takes records of steps and publishes them, a few steps at a time."""

    def __init__(self, labels: dict[str, Any], *, registry: Any = None) -> None:
        """Create the metrics; at most once for a registry.

        Args:
            labels: those that every metric has, with their values.
            registry: prometheus_client's, if not its default one.

        Raises:
            ValueError: the registry has these metrics already.
        """
        # SGLang sets PROMETHEUS_MULTIPROC_DIR before it starts its processes;
        # prometheus_client looks at it when it is imported.
        from prometheus_client import REGISTRY, Counter, Gauge

        registry = REGISTRY if registry is None else registry
        named = {name: str(value) for name, value in labels.items()}
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry, multiprocess_mode="mostrecent")
        self._records: list[StepRecord] = []
        self._steps = _labelled(counter, "steps", "Steps of the engine.", [named])[0]
        self._counters = [
            *_plain(counter, _COUNTERS, named),
            *_by_side(counter, _COUNTERS_BY_SIDE, named),
        ]
        self._gauges = [
            *_plain(gauge, _GAUGES, named),
            *_by_side(gauge, _GAUGES_BY_SIDE, named),
        ]

    def observe(self, record: StepRecord) -> None:
        """Take a record; every ``PUBLISH_EVERY`` steps they become visible."""
        self._records.append(record)
        if len(self._records) >= PUBLISH_EVERY:
            self.flush()

    def flush(self) -> None:
        """Publish what was observed; to be called when the engine falls idle."""
        if not self._records:
            return
        self._steps.inc(len(self._records))
        columns = list(zip(*self._records, strict=True))
        for column, counter in self._counters:
            amount = sum(columns[column])
            # A counter refuses to fall; a wrong record must not end the scheduler.
            if amount > 0:
                counter.inc(amount)
        last = self._records[-1]
        for column, metric in self._gauges:
            metric.set(last[column])
        self._records.clear()


def _plain(
    make: Callable[..., Any], table: dict[str, tuple[str, str]], labels: dict[str, str]
) -> list[tuple[int, Any]]:
    """The metrics of a table, each after the place of its column in a record."""
    return [
        (COLUMNS.index(column), *_labelled(make, name, text, [labels]))
        for name, (column, text) in table.items()
    ]


def _by_side(
    make: Callable[..., Any], table: dict[str, tuple[str, str]], labels: dict[str, str]
) -> list[tuple[int, Any]]:
    """The same for metrics that have a column for each side."""
    by_side = [{**labels, "side": side} for side in SIDES]
    return [
        (COLUMNS.index(f"{start}_{side}"), metric)
        for name, (start, text) in table.items()
        for side, metric in zip(
            SIDES, _labelled(make, name, f"{text} By side.", by_side), strict=True
        )
    ]


def _labelled(
    make: Callable[..., Any], name: str, text: str, labels: list[dict[str, str]]
) -> list[Any]:
    """A metric under each of these sets of labels, which have the same names."""
    metric = make(PREFIX + name, text, tuple(labels[0]))
    return [metric.labels(**each) if each else metric for each in labels]


def step_metrics(scheduler: Any) -> StepMetrics | None:
    """Metrics for an SGLang scheduler, labelled as its own are.

    None without --enable-metrics, and on ranks that do what another one reports: of
    the tensor parallel ranks and pipeline stages, the first reports.
    """
    context = scheduler.metrics_reporter.metrics_collector_context
    if context.collector is None or not context.is_stats_logging_rank:
        return None
    labels = context.collector.labels
    return None if labels.get("pp_rank", 0) else StepMetrics(labels)
