"""What the batches of a server do, as lines of its log.

A line is ``name=value`` pairs (logfmt), one line for each change of a batch's status
and one now and then while it runs::

    batch=batch_1 state=in_progress total=5000 model=demo
    batch=batch_1 done=1200 total=5000 failed=0 lines_per_s=40.1 cached=43% eta=1m35s

Values that come from clients are quoted where they hold anything but plain
characters, so no batch can forge a line.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from typing import Any

from .batch_api import protocol as api
from .history import Rate

logger = logging.getLogger(__name__)

Row = dict[str, Any]

PROGRESS_EVERY_S = 30.0

_ENDS = (api.COMPLETED, api.FAILED, api.CANCELLED, api.EXPIRED)
_PLAIN = re.compile(r"[!#-<>-\[\]-~]+")  # ASCII without space, quote, = and backslash


def batch_changed(row: Row) -> str:
    """Log that a batch has another status, or has been paused or taken up again.

    Args:
        row: the batch as the store has it after the change.

    Returns:
        The line.
    """
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
    """Log how far a batch is that runs.

    Args:
        row: the batch as the store has it.
        rate: None while it is not known.

    Returns:
        The line.
    """
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
    """Logs the progress of batches, each at most once in ``every_s`` seconds.

    Batches that stand still, as those that wait for their turn, are not repeated.
    """

    def __init__(
        self,
        every_s: float = PROGRESS_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_s = every_s
        self._clock = clock
        self._last: dict[str, tuple[float, tuple[Any, ...]]] = {}

    def tick(self, row: Row, rate: Rate | None) -> str | None:
        """To be called at least so often; the first line comes after ``every_s``.

        Returns:
            The line, None if it is not yet time for one or there is nothing new.
        """
        now = self._clock()
        stand = (row["completed"], row["failed"], row.get("paused_reason"))
        logged_at, logged = self._last.setdefault(row["id"], (now, stand))
        if now - logged_at < self._every_s or stand == logged:
            return None
        self._last[row["id"]] = now, stand
        return batch_progress(row, rate)

    def forget(self, batch_id: str) -> None:
        """A batch runs no more."""
        self._last.pop(batch_id, None)


def cached_percent(row: Row) -> str | None:
    """Share of the prompt tokens that came from the cache; None without prompts."""
    tokens = row["input_tokens"]
    return f"{row['cached_tokens'] / tokens:.0%}" if tokens else None


def duration(seconds: float) -> str:
    """A time for people: ``45s``, ``1m35s``, ``2h05m``, ``3d4h``."""
    left = max(0, round(seconds))
    if left < 60:
        return f"{left}s"
    if left < 3600:
        return f"{left // 60}m{left % 60:02d}s"
    if left < 86_400:
        return f"{left // 3600}h{left % 3600 // 60:02d}m"
    return f"{left // 86_400}d{left % 86_400 // 3600}h"


def _end(row: Row) -> Row:
    """What a batch came to: counts, tokens, and why it failed."""
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
    errors = json.loads(row["errors"])["data"] if row.get("errors") else []
    if errors:
        fields |= {"errors": len(errors), "first_error": errors[0]["message"]}
    return fields


def _some(row: Row, *keys: str) -> Row:
    """The fields of these names that say something."""
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
