"""Files and batches as the API shows them, from their rows in the store."""

from __future__ import annotations

import json
from typing import Any

from openai.types import Batch, FileObject, Upload
from openai.types.uploads import UploadPart
from pydantic import BaseModel

from ..request import Usage
from .protocol import CANCELLED, CANCELLING, EXPIRED, FAILED

Row = dict[str, Any]


def dollars(engine_s: float, price: float) -> float:
    """The cost of seconds of an engine, in dollars. The price is for an hour."""
    return round(engine_s * price / 3600, 6)


def batch_object(row: Row, price: float | None = None) -> dict[str, Any]:
    """A batch as the API shows it, nulls included, at dollars for an engine's hour."""
    fields = {
        key: row[key]
        for key in Batch.model_fields
        if key in row and key not in ("metadata", "errors")
    }
    for key in ("metadata", "errors"):
        fields[key] = json.loads(row[key]) if row[key] else None
    fields["object"] = "batch"
    fields["request_counts"] = {
        key: row[key] for key in ("total", "completed", "failed")
    }
    details: dict[str, Any] = {"cached_tokens": row["cached_tokens"]}
    # Not OpenAI's: the share that a perfect prefix cache would have saved, and what of the
    # tokens was not computed at all. The share is of the others, and of all lines: it does
    # not fit a batch that ends early.
    early = row["status"] in (CANCELLING, CANCELLED, EXPIRED, FAILED)
    shared = None if early else row.get("optimal_cached_share")
    possible = computed_usage(row).possible_hit_rate(shared)
    if possible is not None:
        details["optimal_cached_share"] = possible
    if row.get("merged_input_tokens"):
        details["merged_tokens"] = row["merged_input_tokens"]
        details["merged_cached_tokens"] = row["merged_cached_tokens"]
    fields["usage"] = {
        "input_tokens": row["input_tokens"],
        "input_tokens_details": details,
        "output_tokens": row["output_tokens"],
        "output_tokens_details": {"reasoning_tokens": row["reasoning_tokens"]},
        "total_tokens": row["input_tokens"] + row["output_tokens"],
        **_cost(row, price),
    }
    shown = Batch.model_validate(fields).model_dump(mode="json")
    # Not OpenAI's either, and only included if set.
    extra = {
        key: row.get(key) for key in ("priority", "paused_reason", "enough", "dedupe")
    }
    return shown | {key: value for key, value in extra.items() if value}


def computed_usage(row: Row) -> Usage:
    """The tokens of a batch without those of lines that got an equal one's answer."""
    names = ("input_tokens", "cached_tokens", "output_tokens")
    every = Usage(*(row.get(name) or 0 for name in names))
    return every - Usage(*(row.get(f"merged_{name}") or 0 for name in names))


def result_files(row: Row) -> list[str]:
    return [id for id in (row["output_file_id"], row["error_file_id"]) if id]


def _cost(row: Row, price: float | None) -> dict[str, Any]:
    """Not OpenAI's: the engine's seconds, truncated answers, and lines that cost nothing."""
    engine_s = row.get("engine_s") or 0.0
    cost: dict[str, Any] = {"engine_seconds": round(engine_s, 3)}
    if price is not None:
        cost["dollars"] = dollars(engine_s, price)
    if truncated := row.get("truncated"):
        cost["truncated_answers"] = truncated
    if merged := row.get("merged"):
        cost["merged_requests"] = merged
        cost["merged_tokens"] = row["merged_input_tokens"] + row["merged_output_tokens"]
    return cost


def file_object(row: Row) -> dict[str, Any]:
    # Not validated: the client's type lacks a purpose that its uploads may have.
    return _object(FileObject, row, "file") | {"status": "processed"}


def upload_object(row: Row, file: Row | None = None) -> dict[str, Any]:
    """An upload as the API shows it, with the file made from it."""
    shown = None if file is None else file_object(file)
    return _object(Upload, row, "upload") | {"file": shown}


def part_object(row: Row) -> dict[str, Any]:
    return _object(UploadPart, row, "upload.part")


def _object(kind: type[BaseModel], row: Row, name: str) -> dict[str, Any]:
    return {key: row.get(key) for key in kind.model_fields} | {"object": name}


def list_object(objects: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page of a list. An object beyond ``limit`` only tells that there are more."""
    shown = objects[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(objects) > limit,
    }
