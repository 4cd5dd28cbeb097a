"""Counts each step while it is made, and publishes it as Prometheus metrics and CSV.

The metrics are next to SGLang's own with --enable-metrics, and have their labels
(``model_name``, ``tp_rank``, ...). Metrics by side also have ``side``.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ...batch_api.stop_rules import RULES
from ...planner.costs.step_costs import StepSample
from ...planner.requests import SIDES
from ...scheduling.job_plan import StepCost
from ...scheduling.kv_accounting import KvAccounting
from ...scheduling.open_jobs import OpenJobs
from ...scheduling.scheduled_request import ScheduledRequest
from ...scheduling.step_record import (
    COLUMNS,
    Admission,
    StepLog,
    StepRecord,
    StepSamples,
)
from ..compat.scheduler_types import Scheduler
from .kv.planned_cache import PlannedRadixCache

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge

_NO_COST = StepCost(0.0, 0.0, 0.0, 0.0)
_NOTHING = (0, 0, 0)  # by side
# Columns of a record that are summed up, and all sums over the steps.
_SUMMED = (
    "cached_tokens", "evicted_tokens",
    "offloaded", "resumed", "prefetched", "kv_waits", "retracted",
)  # fmt: skip
_TOTALS = (
    *("steps", "prefill_tokens", "decode_tokens"),
    *_SUMMED,
    *(f"cut_{rule}" for rule in RULES),
)


class StepReports(NamedTuple):
    """Where the record of each step goes: the CSV file, Prometheus, and the last steps with
    their seconds. Each is None if it is not wanted."""

    log: Path | None = None
    metrics: StepMetrics | None = None
    samples: StepSamples | None = None


class StepRecorder:
    """Counts one step at a time.

    Attributes:
        offloaded, resumed, prefetched, retracted: requests, in the current step.
        cached: prompt tokens that requests which joined it found in the cache.
        kv_waits: copies from the host that the current step waits for.
        admission: why the next request in line does not join the current step.
        last_admission: the same for the last step.
        changes: requests that arrived, and that ended, since the last step began.
        totals: sums over all steps, for ``/server_info``.
        kv_saved_bytes: KV that attention did not read twice, up to the last step.
    """

    def __init__(
        self,
        jobs: OpenJobs,
        kv_accounting: KvAccounting,
        cache: PlannedRadixCache,
        reports: StepReports,
    ) -> None:
        self._jobs = jobs
        self._kv_accounting = kv_accounting
        self._cache = cache
        self._log = StepLog(reports.log) if reports.log is not None else None
        self._metrics = reports.metrics
        self.samples = reports.samples
        self.kv_saved_bytes = self._saved_before = 0
        self.totals = dict.fromkeys(_TOTALS, 0)
        self.changes = 0
        self.last_admission = Admission.NONE_WAITS
        self._admissions = [0] * len(Admission)
        self._after_prompts = False
        self._reset()

    def _reset(self) -> None:
        self._prefill = [0, 0, 0]
        self._prompts = 0
        self._context = 0
        self._squares = 0
        self._attention = 0
        self._media = 0
        self.cached = 0
        self.offloaded = self.resumed = self.retracted = 0
        self.prefetched = self.kv_waits = 0
        self.admission = Admission.NONE_WAITS

    def prefilled(
        self, request: ScheduledRequest, tokens: int, before: int, media: int
    ) -> None:
        """``tokens`` of a prompt are computed, after ``before`` others. ``media`` of them
        are placeholders of images and sounds."""
        self._prefill[request.side] += tokens
        self._prompts += 1
        self._context += before + tokens
        self._squares += (before + tokens) ** 2
        self._media += media
        self._attention += tokens * (2 * before + tokens)

    def cut(self, rule: str) -> None:
        self.totals[f"cut_{rule}"] += 1
        if self._metrics is not None:
            self._metrics.cut(rule)

    def record(self, num_offloaded: int, *, decodes: bool) -> StepRecord:
        """Close the step whose batch was just built. Called in every step, hence the care
        for speed."""
        kv_accounting = self._kv_accounting
        cost = None
        shared = idle = 0
        waiting = num_offloaded
        for job in self._jobs.each:
            cost = cost or job.plan.cost
            shared += job.uses.locked_tokens
            idle += job.uses.idle_tokens
            waiting += job.backlog.count + job.num_followers
        cost = cost or _NO_COST
        admission = self.admission
        if waiting and admission is Admission.NONE_WAITS:
            followers = waiting > num_offloaded
            admission = (
                Admission.AWAITS_LEADER if followers else Admission.OFFLOADED_FIRST
            )
        self.last_admission = admission
        self._admissions[admission] += 1
        decode = kv_accounting.decoding if decodes else _NOTHING
        prefill_tokens, decode_tokens = sum(self._prefill), sum(decode)
        tokens = prefill_tokens + decode_tokens
        reads = sum(kv_accounting.reads) if decodes else 0
        kv_read_s = reads * cost.kv_read_time_s
        totals = self.totals
        totals["steps"] += 1
        evicted = self._cache.evicted_tokens - totals["evicted_tokens"]
        values = (
            totals["steps"],
            *self._prefill,
            *decode,
            *kv_accounting.kv,
            shared,
            idle,
            self.cached,
            evicted,
            self.offloaded,
            self.resumed,
            self.prefetched,
            self.kv_waits,
            admission,
            self.retracted,
            waiting,
            self.kv_saved_bytes - self._saved_before,
            tokens * cost.token_time_s
            + self._attention * cost.attention_time_s
            + self._media * cost.encoder_token_time_s,
            kv_read_s + cost.weight_read_time_s,
        )
        # Same as StepRecord(*values), in half the time.
        record: StepRecord = tuple.__new__(StepRecord, values)
        totals["prefill_tokens"] += prefill_tokens
        totals["decode_tokens"] += decode_tokens
        self._publish(record)
        if self.samples is not None:
            self._time(prefill_tokens, decode_tokens, reads)
        self._reset()
        return record

    def _publish(self, record: StepRecord) -> None:
        self._saved_before = self.kv_saved_bytes
        totals = self.totals
        for name in _SUMMED:
            totals[name] += getattr(record, name)
        if self._log is not None:
            self._log.append(record)
        if self._metrics is not None:
            self._metrics.observe(record)

    def _time(self, prefill_tokens: int, decode_tokens: int, reads: int) -> None:
        """Time the step, unless copies to and from the host or an encoder are part of it."""
        assert self.samples is not None
        step = None
        if not (self.offloaded or self.resumed or self.retracted or self._media):
            step = StepSample(
                0.0,
                prefill_tokens,
                self._prompts,
                decode_tokens,
                self._attention,
                self._context,
                self._squares,
                reads,
                after_prompts=self._after_prompts,
            )
        self.samples.begin(time.perf_counter(), step, self.changes / 2)
        self.changes = 0
        self._after_prompts = self._prompts > 0

    @property
    def admissions(self) -> dict[str, int]:
        """Steps so far by the reason for which the next request in line did not join."""
        counts = zip(Admission, self._admissions, strict=True)
        return {reason.name.lower(): count for reason, count in counts if count}

    def idle(self) -> None:
        """Nothing runs in this step."""
        if self.samples is not None:
            self.samples.idle()
        self.changes = 0
        self._after_prompts = False

    def flush(self) -> None:
        if self._log is not None:
            self._log.flush()
        if self._metrics is not None:
            self._metrics.flush()


_M = TypeVar("_M", "Counter", "Gauge")

PREFIX = "sglang_batch_"
# Publishing costs many times as much as taking a record, hence once in this many steps.
PUBLISH_EVERY = 16

# Metrics of both kinds, and those of them that have a value for each side.
_TABLES = tomllib.loads(
    Path(__file__).with_name("step_metrics.toml").read_text("utf-8")
)


class HostUse(NamedTuple):
    """The pool of host memory for offloaded KV: bytes in use and in all, and requests
    that lost their KV so far because it was full, or their prefix."""

    num_bytes: int = 0
    capacity: int = 0
    recomputed: int = 0


class StepMetrics:
    """Takes records of steps and publishes them, a few steps at a time.

    Args:
        labels: those of every metric, with their values.
        host_use: called when metrics are published.
        registry: prometheus_client's default registry if None.

    Raises:
        ValueError: the registry has these metrics already.
    """

    def __init__(
        self,
        labels: Mapping[str, object],
        host_use: Callable[[], HostUse] = HostUse,
        *,
        registry: CollectorRegistry | None = None,
    ) -> None:
        # SGLang sets PROMETHEUS_MULTIPROC_DIR before it starts its processes, and
        # prometheus_client reads it when it is imported.
        from prometheus_client import REGISTRY, Counter, Gauge

        registry = REGISTRY if registry is None else registry
        named = {name: str(value) for name, value in labels.items()}
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry, multiprocess_mode="mostrecent")
        self._records: list[StepRecord] = []
        self._steps = _labelled(counter, "steps", "Steps of the engine.", [named])[0]
        self._counters = _columns(counter, "counters", named)
        self._gauges = _columns(gauge, "gauges", named)
        self._host_use, self._host_recomputed = host_use, 0
        text = "Bytes of host memory {}KV of offloaded requests."
        self._host_bytes, self._host_capacity = (
            _labelled(gauge, name, text.format(relation), [named])[0]
            for name, relation in (
                ("host_bytes", "with "),
                ("host_capacity_bytes", "for "),
            )
        )
        text = "Requests on the host that lost their KV, or their prefix."
        self._recomputed = _labelled(counter, "offload_recomputed", text, [named])[0]
        by_rule = [{**named, "rule": rule} for rule in RULES]
        text = "Answers ended by stop rules."
        cuts = _labelled(counter, "answers_cut", text, by_rule)
        self._cuts = dict(zip(RULES, cuts, strict=True))

    def cut(self, rule: str) -> None:
        self._cuts[rule].inc()

    def observe(self, record: StepRecord) -> None:
        """Take a record. Every ``PUBLISH_EVERY`` steps they become visible."""
        self._records.append(record)
        if len(self._records) >= PUBLISH_EVERY:
            self.flush()

    def flush(self) -> None:
        """Publish the records. Called when the engine becomes idle, too."""
        if not self._records:
            return
        self._steps.inc(len(self._records))
        columns = list(zip(*self._records, strict=True))
        for column, counter in self._counters:
            amount = sum(columns[column])
            # A counter raises if it falls. A wrong record must not end the scheduler.
            if amount > 0:
                counter.inc(amount)
        last = self._records[-1]
        for column, metric in self._gauges:
            metric.set(last[column])
        self._records.clear()
        host = self._host_use()
        self._host_bytes.set(host.num_bytes)
        self._host_capacity.set(host.capacity)
        self._recomputed.inc(host.recomputed - self._host_recomputed)
        self._host_recomputed = host.recomputed


def _columns(
    make: Callable[..., _M], kind: str, labels: Mapping[str, str]
) -> list[tuple[int, _M]]:
    """The metrics of a kind, each with the index of its column in a record."""
    sides = [{**labels, "side": side} for side in SIDES]
    found: list[tuple[int, _M]] = []
    for table, each, ends in (
        (kind, [labels], [""]),
        (f"{kind}_by_side", sides, [f"_{side}" for side in SIDES]),
    ):
        for name, row in _TABLES[table].items():
            metrics = _labelled(make, name, row["documentation"], each)
            places = [COLUMNS.index(row["column"] + end) for end in ends]
            found += zip(places, metrics, strict=True)
    return found


def _labelled(
    make: Callable[..., _M], name: str, text: str, labels: Sequence[Mapping[str, str]]
) -> list[_M]:
    """A metric with each of these sets of labels, which have the same names."""
    metric = make(PREFIX + name, text, tuple(labels[0]))
    return [metric.labels(**each) if each else metric for each in labels]


def step_metrics(
    scheduler: Scheduler, host_use: Callable[[], HostUse] = HostUse
) -> StepMetrics | None:
    """Metrics for an SGLang scheduler, with the labels of its own. None without
    --enable-metrics, and but for the first of the ranks and stages that do the same."""
    context = scheduler.metrics_reporter.metrics_collector_context
    if context.collector is None or not context.is_stats_logging_rank:
        return None
    labels = context.collector.labels
    return None if labels.get("pp_rank", 0) else StepMetrics(labels, host_use)
