"""The record of each step: counted while it is made, kept as metrics and as CSV."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..scheduling.job_plan import StepCost
from ..scheduling.line import SIDES, Line
from ..scheduling.step_record import COLUMNS, StepLog, StepRecord
from .step_metrics import StepMetrics

if TYPE_CHECKING:
    from .conductor import Conductor

_NO_COST = StepCost(0.0, 0.0, 0.0, 0.0)
_NOTHING = (0, 0, 0)  # by side
_SUM_EVERY = 32
# What is summed over all steps, and the columns that it is the sum of.
_TOTALS = {
    "prefill_tokens": [f"prefill_{side}" for side in SIDES],
    "decode_tokens": [f"decode_{side}" for side in SIDES],
    **{
        name: [name]
        for name in (
            "cached_tokens",
            "evicted_tokens",
            "parked",
            "resumed",
            "retracted",
        )
    },
}


class Steps:
    """Counts one step at a time.

    Attributes:
        parked, resumed, retracted: requests, in the step that is being made.
        kv_saved_bytes: of KV that attention did not read twice, up to the last step.
        last_kv_read_s: time to read KV in the last step, by the cost model.
    """

    def __init__(self, log: Path | None, metrics: StepMetrics | None) -> None:
        self._log = StepLog(log) if log is not None else None
        self._metrics = metrics
        self._number = 0
        self._evicted_before = 0
        self.kv_saved_bytes = self._saved_before = 0
        self.last_kv_read_s = 0.0
        self._recent: list[StepRecord] = []  # not in the sums yet
        self._totals = dict.fromkeys(("steps", *_TOTALS), 0)
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
        tokens = sum(self._prefill) + sum(decode)
        reads = sum(occupancy.reads) if decodes else 0
        self.last_kv_read_s = reads * cost.kv_read_time_s
        evicted = conductor.cache.evicted_tokens
        self._number += 1
        values = (
            self._number,
            *self._prefill,
            *decode,
            *occupancy.kv,
            shared,
            idle,
            self._cached,
            evicted - self._evicted_before,
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
        self._evicted_before = evicted
        self._saved_before = self.kv_saved_bytes
        self._recent.append(record)
        if len(self._recent) == _SUM_EVERY:
            self._sum_up()
        if self._log is not None:
            self._log.append(record)
        if self._metrics is not None:
            self._metrics.observe(record)
        self._reset()
        return record

    @property
    def totals(self) -> dict[str, int]:
        """Sums over all steps, for ``/server_info``."""
        self._sum_up()
        return self._totals

    def _sum_up(self) -> None:
        columns = dict(zip(COLUMNS, zip(*self._recent, strict=True), strict=False))
        self._totals["steps"] += len(self._recent)
        for name, parts in _TOTALS.items():
            self._totals[name] += sum(sum(columns.get(part, ())) for part in parts)
        self._recent.clear()

    def flush(self) -> None:
        """Write what is held back; the scheduler has nothing to do."""
        if self._log is not None:
            self._log.flush()
        if self._metrics is not None:
            self._metrics.flush()
