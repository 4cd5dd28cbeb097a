"""Counts each step while it is made, and publishes it as metrics and CSV."""

from __future__ import annotations

from pathlib import Path

from ...scheduling.job_plan import StepCost
from ...scheduling.kv_accounting import KvAccounting
from ...scheduling.open_jobs import OpenJobs
from ...scheduling.reports.step_record import StepLog, StepRecord
from ...scheduling.scheduled_request import ScheduledRequest
from .kv.planned_cache import PlannedRadixCache
from .step_metrics import StepMetrics

_NO_COST = StepCost(0.0, 0.0, 0.0, 0.0)
_NOTHING = (0, 0, 0)  # by side
# Sums over all steps.
_TOTALS = (
    "steps", "prefill_tokens", "decode_tokens", "cached_tokens", "evicted_tokens",
    "offloaded", "resumed", "prefetched", "kv_waits",
    "retracted",
)  # fmt: skip


class StepRecorder:
    """Counts one step at a time.

    Args:
        log: the CSV file, if any.

    Attributes:
        offloaded, resumed, prefetched, retracted: requests, in the current step.
        kv_waits: copies from the host that the current step waits for.
        totals: sums over all steps, for ``/server_info``.
        kv_saved_bytes: KV that attention did not read twice, up to the last step.
    """

    def __init__(
        self,
        jobs: OpenJobs,
        kv_accounting: KvAccounting,
        cache: PlannedRadixCache,
        log: Path | None,
        metrics: StepMetrics | None,
    ) -> None:
        self._jobs = jobs
        self._kv_accounting = kv_accounting
        self._cache = cache
        self._log = StepLog(log) if log is not None else None
        self._metrics = metrics
        self.kv_saved_bytes = self._saved_before = 0
        self.totals = dict.fromkeys(_TOTALS, 0)
        self._reset()

    def _reset(self) -> None:
        self._prefill = [0, 0, 0]
        self._attention = 0
        self._media = 0
        self._cached = 0
        self.offloaded = self.resumed = self.retracted = 0
        self.prefetched = self.kv_waits = 0

    def admitted(
        self, request: ScheduledRequest, cached: int, extend: int, media: int
    ) -> None:
        """A request joined with ``cached`` tokens in the cache, ``extend`` computed."""
        if request.steps == 0:
            self._cached += cached
        self.prefilled(request, extend, cached, media)

    def prefilled(
        self, request: ScheduledRequest, tokens: int, before: int, media: int
    ) -> None:
        """``tokens`` of a prompt are computed, after ``before`` others, among them
        ``media`` placeholders of images and sounds."""
        self._prefill[request.side] += tokens
        self._media += media
        self._attention += tokens * (2 * before + tokens)

    def record(self, num_offloaded: int, *, decodes: bool) -> StepRecord:
        """Close the step whose batch was just built.

        Called in every step, hence the care for speed.
        """
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
            self._cached,
            evicted,
            self.offloaded,
            self.resumed,
            self.prefetched,
            self.kv_waits,
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
        self._saved_before = self.kv_saved_bytes
        totals["prefill_tokens"] += prefill_tokens
        totals["decode_tokens"] += decode_tokens
        totals["cached_tokens"] += self._cached
        totals["evicted_tokens"] += evicted
        totals["offloaded"] += self.offloaded
        totals["resumed"] += self.resumed
        totals["prefetched"] += self.prefetched
        totals["kv_waits"] += self.kv_waits
        totals["retracted"] += self.retracted
        if self._log is not None:
            self._log.append(record)
        if self._metrics is not None:
            self._metrics.observe(record)
        self._reset()
        return record

    def flush(self) -> None:
        """Write and publish buffered records. Called when the scheduler is idle."""
        if self._log is not None:
            self._log.flush()
        if self._metrics is not None:
            self._metrics.flush()
