"""What batches cost, by a label that their owners gave them."""

from __future__ import annotations

from typing import Any

from ...batch_api.objects import dollars
from ...store.batch_store import BatchStore, Row


def costs_by_label(
    store: BatchStore, label: str, since: int, owner: str | None
) -> list[Row]:
    """The sums over the batches of each value of a label, by value.

    Args:
        label: a key of the batches' metadata. Batches without it have the value None.
        since: Unix time, batches that were made before do not count.
        owner: whose batches count. None: all.
    """
    return store.rows(
        "SELECT found.value AS value, COUNT(*) AS batches,"
        " SUM(completed) AS completed, SUM(failed) AS failed, SUM(merged) AS merged,"
        " SUM(input_tokens) AS input_tokens, SUM(cached_tokens) AS cached_tokens,"
        " SUM(output_tokens) AS output_tokens,"
        " SUM(merged_input_tokens) AS merged_input_tokens,"
        " SUM(merged_cached_tokens) AS merged_cached_tokens,"
        " SUM(merged_output_tokens) AS merged_output_tokens,"
        " SUM(engine_s) AS engine_s"
        " FROM batches LEFT JOIN json_each(batches.metadata) AS found"
        " ON found.key = ?"
        " WHERE batches.created_at >= ? AND batches.owner = COALESCE(?, batches.owner)"
        " GROUP BY found.value ORDER BY found.value",
        (label, since, owner),
    )


def cost_object(row: Row, price: float | None) -> dict[str, Any]:
    """The costs of a value as the API shows them.

    Args:
        price: dollars for an hour of an engine, or None.
    """
    cached = row["cached_tokens"] - row["merged_cached_tokens"]
    prompt = row["input_tokens"] - row["merged_input_tokens"]
    return {
        "value": row["value"],
        "batches": row["batches"],
        "requests": row["completed"] + row["failed"],
        "merged_requests": row["merged"],
        "computed_input_tokens": prompt - cached,
        "cached_input_tokens": cached,
        "computed_output_tokens": row["output_tokens"] - row["merged_output_tokens"],
        "merged_tokens": row["merged_input_tokens"] + row["merged_output_tokens"],
        "engine_seconds": round(row["engine_s"], 3),
        "dollars": None if price is None else dollars(row["engine_s"], price),
    }
