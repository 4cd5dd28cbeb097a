"""Prometheus counters of the usage of each key, read from the store."""

from __future__ import annotations

from typing import Any

from ...store.batch_store import BatchStore, Row
from .usage import COUNTS, usage_totals

PREFIX = "sglang_batch_key_"
# Names that have a label of their own. The others share one.
MAX_NAMES = 100
OTHER = "(other)"
TOKEN_KINDS = ("input", "cached", "output")


class UsageMetrics:
    """Counters with the name of a key as a label, never the key.

    Args:
        registry: prometheus_client's.
    """

    def __init__(self, registry: Any) -> None:
        from prometheus_client import Counter

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(PREFIX + name, text, ("key", *labels), registry=registry)

        self._counters = {
            "batches": counter("batches", "Batches created, by name of the key."),
            "lines": counter("lines", "Lines of batches created, by name of the key."),
            "calls": counter("calls", "Online calls, by name of the key."),
        }
        self._tokens = counter(
            "tokens",
            "Tokens of lines and online calls, by name of the key and kind. Input "
            "includes cached tokens.",
            "kind",
        )
        self._merged = counter(
            "merged_tokens",
            "Those of the tokens that were not computed, but are an equal line's.",
        )
        self._engine_s = counter(
            "engine_seconds",
            "Seconds of the engine for finished lines, by name of the key.",
        )
        self._before: dict[str, Row] | None = None
        self._labels: dict[str, str] = {}

    def sample(self, store: BatchStore, publish: bool) -> None:
        """Count the usage since the last sample.

        Args:
            publish: whether this process is the one that counts.
        """
        totals = usage_totals(store)
        if publish and self._before is not None:
            for name, row in totals.items():
                self._count(name, self._before.get(name, dict.fromkeys(COUNTS, 0)), row)
        self._before = totals

    def _count(self, name: str, before: Row, row: Row) -> None:
        grown = {count: max(0, row[count] - before[count]) for count in COUNTS}
        if not any(grown.values()):
            return
        full = len(self._labels) >= MAX_NAMES  # names are made by admins only
        label = self._labels.setdefault(name, OTHER if full else name)
        for count, counter in self._counters.items():
            counter.labels(label).inc(grown[count])
        for kind in TOKEN_KINDS:
            self._tokens.labels(label, kind).inc(grown[f"{kind}_tokens"])
        self._merged.labels(label).inc(grown["merged_tokens"])
        self._engine_s.labels(label).inc(grown["engine_s"])
