"""The command keys: add, list, limit, revoke and usage."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from ...errors import ConfigError
from ..progress import aligned
from .batch_client import BatchClient, Shown, short_time
from .client_options import NO_LIMIT

KEYS, LIMITS, USAGE = (f"/offline_batch/{n}" for n in ("keys", "limits", "usage"))
LIMIT_FIELDS = (
    *("models", "batches_per_day", "lines_per_day", "tokens_per_day"),
    "enqueued_tokens",
)

Answer = dict[str, Any]


def add(server: BatchClient, options: argparse.Namespace) -> Shown:
    new = {"name": options.name, "role": options.role, "same_owner": options.same_owner}
    made = server.call("POST", KEYS, new | _limits(options))
    return Shown([made], made["value"])


def list_(server: BatchClient, options: argparse.Namespace) -> Shown:
    keys = server.call("GET", KEYS)["data"]
    header = ("id", "name", "role", "key", "created", "state", "limits")
    rows = [
        (
            key["id"],
            key["name"],
            key["role"],
            key["redacted_value"],
            short_time(key["created_at"]),
            "revoked" if key["revoked_at"] else "active",
            _limits_text(key),
        )
        for key in keys
    ]
    return _table(keys, header, rows, "no keys were added")


def limit(server: BatchClient, options: argparse.Namespace) -> Shown:
    limits = server.call(
        "POST", f"{LIMITS}/{quote(options.name, '')}", _limits(options)
    )
    return Shown([limits], _limits_text(limits))


def usage(server: BatchClient, options: argparse.Namespace) -> Shown:
    days = server.call("GET", USAGE, days=options.days)["data"]
    header = ("day", "name", "batches", "lines", "calls", "input", "cached", "output")
    counts = (
        *("batches", "lines", "calls"),
        *("input_tokens", "cached_tokens", "output_tokens"),
    )
    rows = [
        (day["day"], day["name"], *(f"{day[count]:,}" for count in counts))
        for day in days
    ]
    return _table(days, header, rows, "nothing was used")


def revoke(server: BatchClient, options: argparse.Namespace) -> Shown:
    cancel = str(options.cancel_batches).lower()
    path = f"{KEYS}/{quote(options.key_id, '')}"
    revoked = server.call("DELETE", path, cancel_batches=cancel)
    cancelled = len(revoked["cancelled_batches"])
    more = f", {cancelled} batches cancelled" if options.cancel_batches else ""
    return Shown([revoked], f"{options.key_id} revoked{more}")


def _limits(options: argparse.Namespace) -> Answer:
    """The limits that the command names. The server keeps the others."""
    limits = {f: getattr(options, f) for f in LIMIT_FIELDS if hasattr(options, f)}
    models = limits.get("models", [])
    if NO_LIMIT in models:
        if len(models) > 1:
            raise ConfigError(
                f"--model {NO_LIMIT} removes the list of models: remove the other --model."
            )
        limits["models"] = None
    return limits


def _limits_text(limits: Answer) -> str:
    parts = [
        f"{limits[field]:,} {field.replace('_per_', '/').replace('_', ' ')}"
        for field in LIMIT_FIELDS[1:]
        if limits[field] is not None
    ]
    if limits["models"] is not None:
        parts.append(f"models {', '.join(limits['models'])}")
    return ", ".join(parts) or "no limits"


def _table(
    objects: list[Answer],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    nothing: str,
) -> Shown:
    return Shown(objects, aligned([header, *rows]) if rows else nothing)
