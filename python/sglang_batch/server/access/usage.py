"""Usage of each client per day (UTC), the checks of its limits, and the costs of its batches."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from ...batch_api import protocol as api
from ...batch_api.objects import computed_usage, dollars
from ...errors import ApiError
from ...store.batch_store import BatchStore, Query, Row, now
from .keys import Allowance, find_allowance

# Columns, and when they are counted.
#   batches, lines   when a batch is created
#   calls            online calls that reached the engine
#   tokens           of finished lines, and of online calls as they end
#   merged_tokens    those of them that were not computed, but are an equal line's
#   engine_s         seconds of the engine for finished lines
COUNTS = (
    "batches",
    "lines",
    "calls",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "merged_tokens",
    "engine_s",
)
_TOKENS = ("input_tokens", "cached_tokens", "output_tokens")
COST_COLUMNS = (
    *("completed", "failed", "merged", "engine_s"),
    *(*_TOKENS, *(f"merged_{name}" for name in _TOKENS)),
)
_DAY_S = 86_400


def day_of(unix: float) -> str:
    """The day (UTC) of a Unix time, such as ``2026-11-23``."""
    return datetime.datetime.fromtimestamp(unix, datetime.UTC).date().isoformat()


def add_usage(store: BatchStore, name: str, **counts: float) -> None:
    """Count for a client, today. A call without a named key is not counted."""
    if not name or not any(counts.values()):
        return
    columns = ", ".join(counts)
    # A count may be negative, and is never below 0 in the table.
    values = ", ".join(f"MAX(0, :{c})" for c in counts)
    sums = ", ".join(f"{c} = MAX(0, usage.{c} + :{c})" for c in counts)
    with store.atomic() as db:
        db.execute(
            f"INSERT INTO usage (day, name, {columns})"
            f" VALUES (:day, :name, {values})"
            f" ON CONFLICT (day, name) DO UPDATE SET {sums}",
            {"day": day_of(now()), "name": name, **counts},
        )


def usage_since(store: BatchStore, day: str, name: str | None = None) -> list[Row]:
    """The rows of this day and later ones, of one client if it is named."""
    return store.rows(
        "SELECT * FROM usage WHERE day >= ? AND name = COALESCE(?, name)"
        " ORDER BY day, name",
        (day, name),
    )


def usage_totals(store: BatchStore) -> dict[str, Row]:
    """The sums of each client over all days, by name."""
    rows = store.rows(f"SELECT name, {_sums(COUNTS)} FROM usage GROUP BY name")
    return {row["name"]: row for row in rows}


def _sums(columns: Iterable[str]) -> str:
    return ", ".join(f"SUM({column}) AS {column}" for column in columns)


def used_today(query: Query, name: str) -> dict[str, int]:
    """The batches, lines and tokens that a client has used today."""
    found = query(
        "SELECT batches, lines, input_tokens + output_tokens AS tokens FROM usage"
        " WHERE day = ? AND name = ?",
        (day_of(now()), name),
    )
    return found[0] if found else {"batches": 0, "lines": 0, "tokens": 0}


def check_limits(
    allowance: Allowance, used: dict[str, int], *, batches: int = 0, lines: int = 0
) -> None:
    """Check that a client may use this much more today, or raise OpenAI's 429."""
    for kind, more in (("batches", batches), ("lines", lines), ("tokens", 1)):
        limit: int | None = getattr(allowance, kind)
        # Without more, a limit that was lowered below the use of the day is no reason.
        if more and limit is not None and used[kind] + more > limit:
            left = _DAY_S - now() % _DAY_S
            asked = "" if kind == "tokens" else f", requested {more:,}"
            raise ApiError(
                429,
                f"Rate limit reached for {kind} per day of this API key: limit {limit:,}, "
                f"used {used[kind]:,}{asked}. The day ends in {left // 3600}h"
                f"{left % 3600 // 60:02}m, at midnight UTC. Try again then, or ask the "
                "admin of this server for a higher limit.",
                code="rate_limit_exceeded",
                kind="tokens" if kind == "tokens" else "requests",
                retry=False,
                headers={"Retry-After": str(left)},
            )


def tokens_used_up(store: BatchStore, name: str) -> str | None:
    """Why a client's running batches send no more lines today, or None if they may."""
    limit = find_allowance(store.rows, name).tokens
    if limit is None or used_today(store.rows, name)["tokens"] < limit:
        return None
    return (
        f"The limit of {limit:,} tokens per day of its API key is used up. It continues "
        "at midnight UTC."
    )


def num_left(row: Row) -> int:
    """The lines of a batch without a result."""
    left: int = row["total"] - row["completed"] - row["failed"]
    return max(0, left)


def queued_tokens(store: BatchStore, row: Row) -> float:
    """About the tokens of a batch's lines without a result: by its other lines if it has
    any, or else a token for four bytes of its input."""
    if num_done := row["completed"] + row["failed"]:
        tokens: int = row["input_tokens"] + row["output_tokens"]
        return num_left(row) * tokens / int(num_done)
    with suppress(FileNotFoundError):
        return (store.work_dir(row["id"]) / "input.jsonl").stat().st_size / 4
    return 0.0


def enqueued_refusal(
    store: BatchStore, row: Row, default: int | None, model: str | None
) -> str | None:
    """Why a batch may not be in progress next to those of its owner, None if it may.

    Args:
        default: the most tokens of a client without a limit of its own. None: any.
    """
    owner = row["owner"]
    limit = find_allowance(store.rows, owner).enqueued_tokens
    limit = default if limit is None else limit
    if limit is None:
        return None
    others = (r for r in store.batches_in((api.IN_PROGRESS,)) if r["owner"] == owner)
    used = round(sum(queued_tokens(store, other) for other in others))
    asked = round(queued_tokens(store, row))
    if used + asked <= limit:
        return None
    # As OpenAI's begins and ends, which programs look for.
    return (
        f"Enqueued token limit reached for {model or 'this server'} by "
        f"{f'the API key {owner!r}' if owner else 'calls without a named key'}. "
        f"Limit: {limit:,} enqueued tokens, of which in_progress batches have about "
        f"{used:,} and this one needs {asked:,}. Please try again "
        + (
            "once some in_progress batches have been completed."
            if asked <= limit
            else "with a smaller file, or ask the admin of this server for a higher limit."
        )
    )


def usage_object(row: dict[str, Any]) -> dict[str, Any]:
    shown = {key: row[key] for key in ("day", "name", *COUNTS)}
    shown["engine_seconds"] = round(shown.pop("engine_s"), 3)
    return shown | {"total_tokens": row["input_tokens"] + row["output_tokens"]}


def costs_by_label(
    store: BatchStore, label: str, since: int, owner: str | None
) -> list[Row]:
    """The sums over the batches of each value of a label, by value.

    Batches without this key in their metadata have the value None. Those made
    before the Unix time ``since`` do not count.
    """
    return store.rows(
        f"SELECT found.value AS value, COUNT(*) AS batches, {_sums(COST_COLUMNS)}"
        " FROM batches LEFT JOIN json_each(batches.metadata) AS found"
        " ON found.key = ?"
        " WHERE batches.created_at >= ? AND batches.owner = COALESCE(?, batches.owner)"
        " GROUP BY found.value ORDER BY found.value",
        (label, since, owner),
    )


def cost_object(row: Row, price: float | None) -> dict[str, Any]:
    """The costs of a value as the API shows them, at dollars for an engine's hour."""
    usage = computed_usage(row)
    return {
        "value": row["value"],
        "batches": row["batches"],
        "requests": row["completed"] + row["failed"],
        "merged_requests": row["merged"],
        "computed_input_tokens": usage.input_tokens - usage.cached_tokens,
        "cached_input_tokens": usage.cached_tokens,
        "computed_output_tokens": usage.output_tokens,
        "merged_tokens": row["merged_input_tokens"] + row["merged_output_tokens"],
        "engine_seconds": round(row["engine_s"], 3),
        "dollars": None if price is None else dollars(row["engine_s"], price),
    }
