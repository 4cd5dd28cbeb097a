"""The progress of a server's batches, as lines of its log.

A line is ``name=value`` pairs (logfmt). There is one for each change of a batch's
status, and one every 30 seconds or less often while it runs::

    batch=batch_1 state=in_progress total=5000 model=demo
    batch=batch_1 done=1200 total=5000 failed=0 lines_per_s=40.1 cached=43% eta=1m35s

Values from clients are quoted if they have anything but plain characters, so no batch
can forge a line.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from typing import Any

from ..batch_api import protocol as api
from ..batch_api.objects import computed_usage
from ..store.batch_store import Row
from .history import Rate

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
