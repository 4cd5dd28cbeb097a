"""Passes the shared prefixes of each step to the attention backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from ..compat.scheduler_types import ModelRunner, ScheduleBatch
from .prefix_forest import (
    NO_GROUPS,
    PlannedRequests,
    PrefixForest,
    PrefixForestBuilder,
)

if TYPE_CHECKING:  # it loads the kernels
    from .attention_plans import SharingBackend, SharingCounts


class Sharing:
    """The scheduler's part of attention that reads shared prefixes once.

    Attributes:
        backends: those that share prefixes, empty if none does.
    """

    def __init__(self, model_runner: ModelRunner, jobs: PlannedRequests) -> None:
        self.backends = _backends_of(model_runner)
        self._finder = PrefixForestBuilder(jobs)

    def show(self, batch: ScheduleBatch, decoded_apart: int = 0) -> None:
        """Set a batch's groups on the backends, right before the batch runs.

        Args:
            decoded_apart: rows at its end that decode in a forward of their own. 0 if
                the batch is one forward.
        """
        mode = batch.forward_mode
        if batch.reqs and (mode.is_decode() or mode.is_mixed()):
            rows = batch.req_pool_indices_cpu.numpy().astype(np.int32)
            decodes = mode.is_decode() or decoded_apart > 0
            reqs = batch.reqs[-decoded_apart:]
            groups = self._finder.of(reqs, rows[-decoded_apart:], decodes=decodes)
        else:
            self._finder.forget()
            groups = NO_GROUPS
        self._set(groups)

    def show_nothing(self) -> None:
        """Have the next forward share nothing: it is not the one that was shown."""
        self._finder.forget()
        self._set(NO_GROUPS)

    def _set(self, groups: PrefixForest) -> None:
        for backend in self.backends:
            backend.groups = groups

    @property
    def saved_bytes(self) -> int:
        """Bytes of KV that sharing has saved reading so far."""
        counts = self._counts
        return sum(each.kv_bytes_unshared - each.kv_bytes for each in counts)

    @property
    def totals(self) -> dict[str, int]:
        """Counters for ``/server_info``, empty if prefixes are not shared."""
        counts = self._counts
        if not counts:
            return {}
        return {
            "attention_steps": sum(each.steps for each in counts),
            "attention_steps_shared": sum(each.shared_steps for each in counts),
            "kv_read_bytes": sum(each.kv_bytes for each in counts),
            "kv_read_bytes_saved": self.saved_bytes,
        }

    @property
    def _counts(self) -> list[SharingCounts]:
        return [backend.plans.counts for backend in self.backends]


def _backends_of(model_runner: ModelRunner) -> list[SharingBackend]:
    """The model runner's backends that share prefixes: none, one or two."""
    used = model_runner.attn_backend
    parts = [
        used,
        *(getattr(used, f"{x}_backend", None) for x in ("prefill", "decode")),
    ]
    return [
        cast("SharingBackend", part)
        for part in parts
        if getattr(part, "shares_prefixes", False)
    ]
