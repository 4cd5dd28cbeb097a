"""The record of each step: counted while it is made, kept as metrics and as CSV."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..scheduling.job_plan import StepCost
from ..scheduling.line import LEFT, ONLINE, RIGHT, Line
from ..scheduling.step_record import StepLog, StepRecord
from .step_metrics import StepMetrics

if TYPE_CHECKING:
    from .conductor import Conductor

_NO_COST = StepCost(0.0, 0.0, 0.0, 0.0)


class Steps:
    """Counts one step at a time.

    Attributes:
        parked, resumed, retracted: requests, in the step that is being made.
        last_kv_read_s: time to read KV in the last step, by the cost model.
        totals: sums over all steps, for ``/server_info``.
    """

    def __init__(self, log: Path | None, metrics: StepMetrics | None) -> None:
        self._log = StepLog(log) if log is not None else None
        self._metrics = metrics
        self._number = 0
        self._evicted_before = 0
        self.last_kv_read_s = 0.0
        self.totals = dict.fromkeys(
            ("steps", "prefill_tokens", "decode_tokens", "cached_tokens",
             "evicted_tokens", "parked", "resumed", "retracted"), 0,
        )  # fmt: skip
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

    def record(self, conductor: Conductor, batch: Any, *, decodes: bool) -> StepRecord:
        """Close the step whose batch was just made."""
        occupancy, jobs = conductor.occupancy, conductor.jobs.values()
        cost = next((job.plan.cost for job in jobs), _NO_COST)
        decode = list(occupancy.decoding) if decodes else [0, 0, 0]
        tokens = sum(self._prefill) + sum(decode)
        reads = sum(occupancy.reads) if decodes else 0
        self.last_kv_read_s = reads * cost.kv_read_time_s
        evicted = conductor.cache.evicted_tokens
        self._number += 1
        record = StepRecord(
            self._number,
            *(self._prefill[side] for side in (LEFT, RIGHT, ONLINE)),
            *(decode[side] for side in (LEFT, RIGHT, ONLINE)),
            *(occupancy.kv[side] for side in (LEFT, RIGHT, ONLINE)),
            kv_shared=sum(job.uses.locked_tokens for job in jobs),
            kv_cached=sum(job.uses.idle_tokens for job in jobs),
            cached_tokens=self._cached,
            evicted_tokens=evicted - self._evicted_before,
            parked=self.parked,
            resumed=self.resumed,
            retracted=self.retracted,
            waiting=conductor.num_waiting,
            compute_s=tokens * cost.token_time_s
            + self._attention * cost.attention_time_s,
            memory_s=self.last_kv_read_s + cost.weight_read_time_s,
        )
        self._evicted_before = evicted
        self._keep(record)
        self._reset()
        return record

    def _keep(self, record: StepRecord) -> None:
        totals = self.totals
        totals["steps"] += 1
        totals["prefill_tokens"] += (
            record.prefill_left + record.prefill_right + record.prefill_online
        )
        totals["decode_tokens"] += (
            record.decode_left + record.decode_right + record.decode_online
        )
        for name in (
            "cached_tokens",
            "evicted_tokens",
            "parked",
            "resumed",
            "retracted",
        ):
            totals[name] += getattr(record, name)
        if self._log is not None:
            self._log.append(record)
        if self._metrics is not None:
            self._metrics.observe(record)

    def flush(self) -> None:
        """Write what is held back; the scheduler has nothing to do."""
        if self._log is not None:
            self._log.flush()
        if self._metrics is not None:
            self._metrics.flush()
