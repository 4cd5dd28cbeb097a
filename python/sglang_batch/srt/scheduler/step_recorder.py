"""Counts each step while it is made, and publishes it as metrics and CSV."""

from __future__ import annotations

import time
from pathlib import Path

from ...planner.costs.step_costs import StepSample
from ...scheduling.job_plan import StepCost
from ...scheduling.kv_accounting import KvAccounting
from ...scheduling.open_jobs import OpenJobs
from ...scheduling.reports.step_record import StepLog, StepRecord
from ...scheduling.reports.step_samples import StepSamples
from ...scheduling.scheduled_request import ScheduledRequest
from ...stop_rules.rule_settings import RULES
from .kv.planned_cache import PlannedRadixCache
from .step_metrics import StepMetrics

_NO_COST = StepCost(0.0, 0.0, 0.0, 0.0)
_NOTHING = (0, 0, 0)  # by side
# Sums over all steps.
_TOTALS = (
    "steps", "prefill_tokens", "decode_tokens", "cached_tokens", "evicted_tokens",
    "offloaded", "resumed", "prefetched", "kv_waits",
    "retracted", *(f"cut_{rule}" for rule in RULES),
)  # fmt: skip


class StepRecorder:
    """Counts one step at a time.

    Args:
        log: the CSV file, if any.
        samples: steps with their seconds, if they are to be kept.

    Attributes:
        offloaded, resumed, prefetched, retracted: requests, in the current step.
        kv_waits: copies from the host that the current step waits for.
        changes: requests that arrived, and that ended, since the last step began.
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
        samples: StepSamples | None = None,
    ) -> None:
        self._jobs = jobs
        self._kv_accounting = kv_accounting
        self._cache = cache
        self._log = StepLog(log) if log is not None else None
        self._metrics = metrics
        self.samples = samples
        self.kv_saved_bytes = self._saved_before = 0
        self.totals = dict.fromkeys(_TOTALS, 0)
        self.changes = 0
        self._after_prompts = False
        self._reset()

    def _reset(self) -> None:
        self._prefill = [0, 0, 0]
        self._prompts = 0
        self._context = 0
        self._squares = 0
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
        self._prompts += 1
        self._context += before + tokens
        self._squares += (before + tokens) ** 2
        self._media += media
        self._attention += tokens * (2 * before + tokens)

    def cut(self, rule: str) -> None:
        """A stop rule ended an answer."""
        self.totals[f"cut_{rule}"] += 1
        if self._metrics is not None:
            self._metrics.cut(rule)

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
        if self.samples is not None:
            self._time(prefill_tokens, decode_tokens, reads)
        self._reset()
        return record

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

    def idle(self) -> None:
        """Nothing runs in this step."""
        if self.samples is not None:
            self.samples.idle()
        self.changes = 0
        self._after_prompts = False

    def flush(self) -> None:
        """Write and publish buffered records. Called when the scheduler is idle."""
        if self._log is not None:
            self._log.flush()
        if self._metrics is not None:
            self._metrics.flush()
