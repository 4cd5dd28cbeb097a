"""The progress of a server's batches: the history of the last hour, and lines of its log.

The history is kept only in memory: a new server has none, even on an old store.

A line of the log is ``name=value`` pairs (logfmt). There is one for each change of a batch's
status, and one every 30 seconds or less often while it runs::

    batch=batch_1 state=in_progress total=5000 model=demo
    batch=batch_1 done=1200 total=5000 failed=0 lines_per_s=40.1 cached=43% eta=1m35s

Values from clients are quoted if they have anything but plain characters, so no batch can
forge a line.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..batch_api import protocol as api
from ..batch_api.objects import computed_usage
from ..job.engine import Engine, KvUse
from ..request import Counts
from ..store.batch_store import BatchStore, Row
from .background import Repeated

SAMPLE_S = 5.0
NUM_POINTS = 720
# Seconds over which a rate is measured.
WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast a batch progresses.

    Lines with an error count as answered. ``tokens_per_s`` are those of prompts,
    computed or cached, and of answers. ``eta_s`` is None while no line is answered.
    """

    lines_per_s: float
    tokens_per_s: float
    output_tokens_per_s: float
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class Point:
    """The server at one Unix time, or since the previous point.

    Tokens are those of lines that were answered since then, but for merged ones: a
    line counts when it ends. ``kv`` is None if no batch is in progress, or the
    engine does not count by side.
    """

    time: float
    computed_tokens_per_s: float
    cached_tokens_per_s: float
    output_tokens_per_s: float
    lines_left: int
    kv: KvUse | None


@dataclass(frozen=True, slots=True)
class _Done(Counts):
    """Counts of a batch: lines answered, and tokens of those lines."""

    lines: int = 0
    computed: int = 0
    cached: int = 0
    output: int = 0

    @property
    def tokens(self) -> int:
        return self.computed + self.cached + self.output


class History:
    """Samples of one server process since its start."""

    def __init__(self, store: BatchStore, engine: Engine | None = None) -> None:
        self._store = store
        self._engine = engine
        self._points: deque[Point] = deque(maxlen=NUM_POINTS)
        self._tracks: dict[str, deque[tuple[float, _Done]]] = {}
        self._left: dict[str, int] = {}
        self._sampled_at: float | None = None
        self._newest_seq: int | None = None
        self._seqs: list[int] = []  # of the batches that were active
        self.sampling = Repeated(
            lambda: self.sample(time.time()), SAMPLE_S, "Taking a sample of the batches"
        )

    async def sample(self, now: float) -> None:
        """Sample the active batches and the engine, at a Unix time in seconds."""
        before = self._sampled_at
        if before is not None and now <= before:
            # The clock was set back: rates across that would be wrong.
            self._tracks.clear()
            self._points.clear()
            before = None
        rows, self._newest_seq = self._store.changed_batches(
            api.ACTIVE_STATUSES, self._newest_seq, self._seqs
        )
        growths = [self._note(row, now, before) for row in rows]
        grown = sum(growths, _Done())
        active = {
            row["id"]: row for row in rows if row["status"] in api.ACTIVE_STATUSES
        }
        for batch_id in self._tracks.keys() - active.keys():
            del self._tracks[batch_id]
        self._seqs = [row["seq"] for row in active.values()]
        self._left = {
            batch_id: int(max(row["total"] - row["completed"] - row["failed"], 0))
            for batch_id, row in active.items()
        }
        self._sampled_at = now
        # The first sample has no growth, over whatever time.
        seconds = now - before if before is not None else 1.0
        self._points.append(
            Point(
                time=now,
                computed_tokens_per_s=grown.computed / seconds,
                cached_tokens_per_s=grown.cached / seconds,
                output_tokens_per_s=grown.output / seconds,
                lines_left=sum(self._left.values()),
                kv=await self._kv_use(active.values()),
            )
        )

    def rate(self, batch_id: str) -> Rate | None:
        """How fast a batch progresses, or None if it does not run or is unknown."""
        track = self._tracks.get(batch_id)
        if track is None or len(track) < 2:
            return None
        (began, first), (ended, last) = track[0], track[-1]
        seconds, grown = ended - began, last - first
        lines_per_s = grown.lines / seconds
        eta_s = self._left[batch_id] / lines_per_s if lines_per_s else None
        return Rate(
            lines_per_s=lines_per_s,
            tokens_per_s=grown.tokens / seconds,
            output_tokens_per_s=grown.output / seconds,
            eta_s=eta_s,
        )

    def rates(self) -> dict[str, Rate]:
        found = {batch_id: self.rate(batch_id) for batch_id in self._tracks}
        return {batch_id: rate for batch_id, rate in found.items() if rate is not None}

    def points(self, after: float = 0.0) -> list[Point]:
        """The points later than this Unix time, all if the clock was set back."""
        if self._points and after > self._points[-1].time:
            after = 0.0
        return [point for point in self._points if point.time > after]

    def _note(self, row: Row, now: float, before: float | None) -> _Done:
        """Add a batch's counts to its track and return by how much they grew."""
        usage = computed_usage(row)
        counts = _Done(
            lines=row["completed"] + row["failed"],
            computed=usage.input_tokens - usage.cached_tokens,
            cached=usage.cached_tokens,
            output=usage.output_tokens,
        )
        track = self._tracks.get(row["id"])
        if track is None:
            track = self._tracks[row["id"]] = deque()
            if before is not None:
                # It began since the last sample, with all its counters at 0.
                track.append((before, _Done()))
        last = track[-1][1] if track else counts
        if min((counts - last).counts()) < 0:
            # It was resumed from results that are slightly older.
            track.clear()
            last = counts
        if len(track) == 1 and counts == last:
            # The time before the first line would make the rate too low.
            track.clear()
        track.append((now, counts))
        while len(track) > 2 and track[1][0] <= now - WINDOW_S:
            track.popleft()
        return counts - last

    async def _kv_use(self, active: Iterable[Row]) -> KvUse | None:
        if self._engine is None or not any(
            row["status"] == api.IN_PROGRESS for row in active
        ):
            return None
        return await self._engine.kv_use()


logger = logging.getLogger(__name__)

PROGRESS_EVERY_S = 30.0

_ENDS = (api.COMPLETED, api.FAILED, api.CANCELLED, api.EXPIRED)
_PLAIN = re.compile(r"[!#-<>-\[\]-~]+")  # ASCII without space, quote, = and backslash


def batch_changed(row: Row) -> str:
    """Log that a batch has changed its status, was paused, or was resumed."""
    fields: Row = {"batch": row["id"], "state": row["status"]}
    if row["status"] == api.VALIDATING:
        fields |= _some(row, "endpoint", "input_file_id", "completion_window", "owner")
        fields |= _some(row, "priority", "api")
    elif row["status"] in _ENDS:
        fields |= _end(row)
    else:
        fields |= {"total": row["total"], **_some(row, "model", "priority")}
        fields |= {"done": row["completed"] + row["failed"], "failed": row["failed"]}
        if row.get("paused_reason"):
            fields["paused"] = row["paused_reason"]
    return _log(fields)


def batch_progress(row: Row, rate: Rate | None) -> str:
    """Log the progress of a running batch. The rate is None while it is unknown."""
    done = row["completed"] + row["failed"]
    fields: Row = {"batch": row["id"], "done": done, "total": row["total"]}
    fields["failed"] = row["failed"]
    if rate is not None:
        fields["lines_per_s"] = round(rate.lines_per_s, 1)
        fields["tokens_per_s"] = round(rate.tokens_per_s)
    fields["cached"] = cached_percent(row)
    if rate is not None and rate.eta_s is not None:
        fields["eta"] = duration(rate.eta_s)
    fields["paused"] = row.get("paused_reason")
    return _log(fields)


class ProgressLog:
    """Logs each batch with progress at most once in ``every_s`` seconds."""

    def __init__(
        self,
        every_s: float = PROGRESS_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_s = every_s
        self._clock = clock
        self._last: dict[str, tuple[float, tuple[Any, ...]]] = {}

    def tick(self, row: Row, rate: Rate | None) -> str | None:
        """Log a batch that has changed, for the first time after ``every_s`` seconds."""
        now = self._clock()
        counts = (row["completed"], row["failed"], row.get("paused_reason"))
        logged_at, logged = self._last.setdefault(row["id"], (now, counts))
        if now - logged_at < self._every_s or counts == logged:
            return None
        self._last[row["id"]] = now, counts
        return batch_progress(row, rate)

    def forget(self, batch_id: str) -> None:
        self._last.pop(batch_id, None)


def cached_percent(row: Row) -> str | None:
    """Share of the computed prompt tokens that were cached. None without any."""
    usage = computed_usage(row)
    return f"{usage.cache_hit_rate:.0%}" if usage.input_tokens else None


def duration(seconds: float) -> str:
    """A readable duration: ``45s``, ``1m35s``, ``2h05m``, ``3d4h``."""
    left = max(0, round(seconds))
    if left < 60:
        return f"{left}s"
    if left < 3600:
        return f"{left // 60}m{left % 60:02d}s"
    if left < 86_400:
        return f"{left // 3600}h{left % 3600 // 60:02d}m"
    return f"{left // 86_400}d{left % 86_400 // 3600}h"


def _end(row: Row) -> Row:
    """The result of a batch: counts, tokens, and why it failed."""
    fields: Row = {key: row[key] for key in ("total", "completed", "failed")}
    unrun = row["total"] - row["completed"] - row["failed"]
    if unrun > 0:
        fields["unrun"] = unrun
    if row["input_tokens"] or row["output_tokens"]:
        fields["input_tokens"] = row["input_tokens"]
        fields["output_tokens"] = row["output_tokens"]
        fields["cached"] = cached_percent(row)
    ended_at = row.get(f"{row['status']}_at")
    if ended_at:
        fields["took"] = duration(ended_at - row["created_at"])
    fields |= _some(row, "output_file_id", "error_file_id")
    if row.get("errors"):
        errors = json.loads(row["errors"])
        data = errors["data"]
        total = errors.get("total", len(data))  # not in rows of earlier releases
        fields |= {"errors": total, "first_error": data[0]["message"]}
    return fields


def _some(row: Row, *keys: str) -> Row:
    return {key: row[key] for key in keys if row.get(key)}


def _log(fields: Row) -> str:
    line = " ".join(
        f"{key}={_value(value)}" for key, value in fields.items() if value is not None
    )
    logger.info("%s", line)
    return line


def _value(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
