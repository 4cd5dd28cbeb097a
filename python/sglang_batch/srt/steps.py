"""The record of each step: counted while it is made, kept as metrics and as CSV."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..scheduling.job_plan import StepCost
from ..scheduling.line import Line
from ..scheduling.step_record import StepLog, StepRecord
from .step_metrics import StepMetrics

if TYPE_CHECKING:
    from .conductor import Conductor

_NO_COST = StepCost(0.0, 0.0, 0.0, 0.0)
_NOTHING = (0, 0, 0)  # by side
# What is summed over all steps.
_TOTALS = (
    "steps", "prefill_tokens", "decode_tokens", "cached_tokens", "evicted_tokens",
    "parked", "resumed", "retracted",
)  # fmt: skip


class Steps:
    """Counts one step at a time.

    Attributes:
        parked, resumed, retracted: requests, in the step that is being made.
        totals: sums over all steps, for ``/server_info``.
        kv_saved_bytes: of KV that attention did not read twice, up to the last step.
        last_kv_read_s: time to read KV in the last step, by the cost model.
    """

    def __init__(self, log: Path | None, metrics: StepMetrics | None) -> None:
        self._log = StepLog(log) if log is not None else None
        self._metrics = metrics
        self.kv_saved_bytes = self._saved_before = 0
        self.last_kv_read_s = 0.0
        self.totals = dict.fromkeys(_TOTALS, 0)
        self._reset()

    def _reset(self) -> None:
        self._prefill = [0, 0, 0]
        self._attention = 0
        self._cached = 0
        self.parked = self.resumed = self.retracted = 0

    def admitted(self, line: Line, cached: int, extend: int) -> None:
        """A request joined with ``cached`` tokens in the cache, ``extend`` computed."""
        if line.steps == 0:
            self._cached += cached
        self.prefilled(line, extend, cached)

    def prefilled(self, line: Line, tokens: int, before: int | None = None) -> None:
        """``tokens`` of a prompt are computed, behind ``before`` others."""
        self._prefill[line.side] += tokens
        if before is None:
            before = line.req.prefix_len
        self._attention += tokens * (2 * before + tokens)

    def record(self, conductor: Conductor, *, decodes: bool) -> StepRecord:
        """Close the step whose batch was just made. It comes in every step: no waste."""
        occupancy = conductor.occupancy
        cost = None
        shared = idle = 0
        waiting = conductor.rooms.num_parked
        for job in conductor.jobs.each:
            cost = cost or job.plan.cost
            shared += job.uses.locked_tokens
            idle += job.uses.idle_tokens
            waiting += job.backlog.count + job.num_followers
        cost = cost or _NO_COST
        decode = occupancy.decoding if decodes else _NOTHING
        prefill_tokens, decode_tokens = sum(self._prefill), sum(decode)
        tokens = prefill_tokens + decode_tokens
        reads = sum(occupancy.reads) if decodes else 0
        self.last_kv_read_s = reads * cost.kv_read_time_s
        totals = self.totals
        totals["steps"] += 1
        evicted = conductor.cache.evicted_tokens - totals["evicted_tokens"]
        values = (
            totals["steps"],
            *self._prefill,
            *decode,
            *occupancy.kv,
            shared,
            idle,
            self._cached,
            evicted,
            self.parked,
            self.resumed,
            self.retracted,
            waiting,
            self.kv_saved_bytes - self._saved_before,
            tokens * cost.token_time_s + self._attention * cost.attention_time_s,
            self.last_kv_read_s + cost.weight_read_time_s,
        )
        # What StepRecord(*values) does, in half the time.
        record: StepRecord = tuple.__new__(StepRecord, values)
        self._saved_before = self.kv_saved_bytes
        totals["prefill_tokens"] += prefill_tokens
        totals["decode_tokens"] += decode_tokens
        totals["cached_tokens"] += self._cached
        totals["evicted_tokens"] += evicted
        totals["parked"] += self.parked
        totals["resumed"] += self.resumed
        totals["retracted"] += self.retracted
        if self._log is not None:
            self._log.append(record)
        if self._metrics is not None:
            self._metrics.observe(record)
        self._reset()
        return record

    def flush(self) -> None:
        """Write what is held back; the scheduler has nothing to do."""
        if self._log is not None:
            self._log.flush()
        if self._metrics is not None:
            self._metrics.flush()
