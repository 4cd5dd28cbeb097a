"""Prometheus metrics of steps, scraped from one process and from many."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import preloaded
import pytest
from prometheus_client import CollectorRegistry
from sglang.srt.observability.metrics_collector import SchedulerMetricsCollectorContext

from sglang_batch.scheduling.step_record import COLUMNS, StepRecord
from sglang_batch.srt.scheduler.step_recorder import (
    PUBLISH_EVERY,
    HostUse,
    StepMetrics,
    step_metrics,
)

LABELS = {"model_name": "demo", "tp_rank": "0", "priority": ""}


def record(**values: Any) -> StepRecord:
    return StepRecord(*[0] * (len(COLUMNS) - 2), 0.0, 0.0)._replace(**values)


def values(registry: CollectorRegistry) -> dict[str, float]:
    """By metric, followed by its side or rule if it has one. All have our labels."""
    found = {}
    for metric in registry.collect():
        for sample in metric.samples:
            labels = dict(sample.labels)
            side = labels.pop("side", None) or labels.pop("rule", None)
            assert labels == LABELS
            if not sample.name.endswith("_created"):
                found[sample.name + (f"/{side}" if side else "")] = sample.value
    return found


def test_counters_add_up_and_gauges_are_the_last_step() -> None:
    registry = CollectorRegistry()
    host = iter((HostUse(300, 4000, 2), HostUse(100, 4000, 5)))
    metrics = StepMetrics(LABELS, lambda: next(host), registry=registry)
    first = StepRecord(1, *range(2, 23), compute_s=0.5, memory_s=0.25)
    metrics.observe(first)
    metrics.flush()
    metrics.observe(first._replace(kv_left=70, kv_shared=80, waiting=3))
    metrics.flush()
    metrics.flush()
    metrics.cut("json")
    assert values(registry) == {
        "sglang_batch_steps_total": 2,
        "sglang_batch_answers_cut_total/json": 1,
        "sglang_batch_answers_cut_total/regex": 0,
        "sglang_batch_answers_cut_total/repetition": 0,
        "sglang_batch_prefill_tokens_total/left": 4,
        "sglang_batch_prefill_tokens_total/right": 6,
        "sglang_batch_prefill_tokens_total/online": 8,
        "sglang_batch_decode_tokens_total/left": 10,
        "sglang_batch_decode_tokens_total/right": 12,
        "sglang_batch_decode_tokens_total/online": 14,
        "sglang_batch_kv_tokens/left": 70,
        "sglang_batch_kv_tokens/right": 9,
        "sglang_batch_kv_tokens/online": 10,
        "sglang_batch_kv_shared_tokens": 80,
        "sglang_batch_kv_cached_tokens": 12,
        "sglang_batch_cached_tokens_total": 26,
        "sglang_batch_evicted_tokens_total": 28,
        "sglang_batch_offloaded_total": 30,
        "sglang_batch_parked_total": 30,
        "sglang_batch_resumed_total": 32,
        "sglang_batch_prefetched_total": 34,
        "sglang_batch_kv_waits_total": 36,
        "sglang_batch_retracted_total": 40,
        "sglang_batch_waiting_requests": 3,
        "sglang_batch_host_bytes": 100,
        "sglang_batch_host_capacity_bytes": 4000,
        "sglang_batch_offload_recomputed_total": 5,
        "sglang_batch_kv_read_bytes_saved_total": 44,
        "sglang_batch_compute_seconds_total": 1.0,
        "sglang_batch_memory_seconds_total": 0.5,
    }


def test_the_help_of_a_deprecated_metric_names_the_new_one() -> None:
    registry = CollectorRegistry()
    StepMetrics(LABELS, registry=registry)
    text = {metric.name: metric.documentation for metric in registry.collect()}
    assert text["sglang_batch_parked"] == (
        "Deprecated: use sglang_batch_offloaded_total instead."
    )
    assert "Deprecated" not in text["sglang_batch_offloaded"]


def test_steps_are_published_a_few_at_a_time() -> None:
    registry = CollectorRegistry()
    metrics = StepMetrics(LABELS, registry=registry)
    seen = []
    for _ in range(2 * PUBLISH_EVERY):
        metrics.observe(record(offloaded=1))
        seen.append(values(registry)["sglang_batch_offloaded_total"])
    assert seen[PUBLISH_EVERY - 2 : PUBLISH_EVERY] == [0, PUBLISH_EVERY]
    assert seen[-2:] == [PUBLISH_EVERY, 2 * PUBLISH_EVERY]


def test_a_wrong_record_does_not_end_the_scheduler() -> None:
    registry = CollectorRegistry()
    metrics = StepMetrics(LABELS, registry=registry)
    metrics.observe(record(evicted_tokens=-5, compute_s=float("nan")))
    metrics.flush()
    found = values(registry)
    assert found["sglang_batch_evicted_tokens_total"] == 0
    assert found["sglang_batch_compute_seconds_total"] == 0
    assert found["sglang_batch_steps_total"] == 1


def test_a_step_costs_little() -> None:
    metrics = StepMetrics(LABELS, registry=CollectorRegistry())
    step = record(prefill_left=9, decode_right=8, kv_left=7, compute_s=0.1)
    rounds = 100 * PUBLISH_EVERY
    started = time.thread_time()
    for _ in range(rounds):
        metrics.observe(step)
    assert (time.thread_time() - started) / rounds < 20e-6


def test_other_processes_are_scraped_as_sglang_scrapes_them(tmp_path: Path) -> None:
    """SGLang's server collects from the files that its scheduler processes write."""
    program = """
        import sys
        from sglang_batch.scheduling.step_record import COLUMNS, StepRecord
        from sglang_batch.srt.scheduler.step_recorder import StepMetrics
        assert "prometheus_client" not in sys.modules
        metrics = StepMetrics({"model_name": "demo", "dp_rank": int(sys.argv[1])})
        metrics.observe(StepRecord(1, *[6] * (len(COLUMNS) - 3), 1.5, 2.5))
        metrics.flush()
    """
    scrape = """
        from prometheus_client import CollectorRegistry, generate_latest, multiprocess
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        print(generate_latest(registry).decode())
    """
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    def python(code: str, *arguments: str) -> str:
        command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
        done = preloaded.run(command, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for rank in ("0", "1", "1"):
        python(program, rank)
    lines = dict(
        each.rsplit(" ", 1)
        for each in python(scrape).splitlines()
        if each.startswith("sglang_batch_")
    )

    def of(name: str, rank: int, side: str = "") -> float:
        found = [
            float(value)
            for key, value in lines.items()
            if key.startswith(f"{name}{{")
            and f'dp_rank="{rank}"' in key
            and (f'side="{side}"' in key) == bool(side)
        ]
        (value,) = found
        return value

    assert of("sglang_batch_memory_seconds_total", 0) == 2.5
    assert of("sglang_batch_memory_seconds_total", 1) == 5.0
    assert of("sglang_batch_decode_tokens_total", 1, "right") == 12
    assert of("sglang_batch_kv_tokens", 1, "online") == 6
    assert of("sglang_batch_waiting_requests", 0) == 6


def scheduler(collector: Any, *, reports: bool = True) -> Any:
    context = SchedulerMetricsCollectorContext(
        enable_metrics=collector is not None,
        is_stats_logging_rank=reports,
        current_scheduler_metrics_enabled=reports,
        enable_kv_cache_events=False,
        collector=collector,
    )
    return SimpleNamespace(
        metrics_reporter=SimpleNamespace(metrics_collector_context=context)
    )


def test_only_the_first_rank_reports_and_only_if_asked_to() -> None:
    collector = SimpleNamespace(labels={"model_name": "demo", "pp_rank": 0})
    second_stage = SimpleNamespace(labels={"model_name": "demo", "pp_rank": 1})
    assert step_metrics(scheduler(None)) is None
    assert step_metrics(scheduler(collector, reports=False)) is None
    assert step_metrics(scheduler(second_stage)) is None
    assert isinstance(step_metrics(scheduler(collector)), StepMetrics)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        step_metrics(scheduler(collector))
