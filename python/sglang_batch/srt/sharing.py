"""Tells the attention backend, step by step, who shares which prefix; sums up what
that saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .prefix_groups import NO_GROUPS, GroupFinder

if TYPE_CHECKING:
    from .attention_plans import SharingCounts
    from .open_jobs import OpenJobs


class Sharing:
    """The scheduler's side of attention that reads shared prefixes once.

    Attributes:
        backends: of that kind; empty where none is in use.
    """

    def __init__(self, model_runner: Any, jobs: OpenJobs) -> None:
        self.backends = _backends_of(model_runner)
        self._finder = GroupFinder(jobs)

    def show(self, batch: Any) -> None:
        """Leave a batch's groups with the backend, right before the batch runs."""
        mode = batch.forward_mode
        if batch.reqs and (mode.is_decode() or mode.is_mixed()):
            rows = batch.req_pool_indices_cpu.numpy().astype(np.int32)
            groups = self._finder.of(batch.reqs, rows, decodes=mode.is_decode())
        else:
            self._finder.forget()
            groups = NO_GROUPS
        for backend in self.backends:
            backend.groups = groups

    @property
    def saved_bytes(self) -> int:
        """Bytes of KV that did not have to be read again, so far."""
        counts = self._counts
        return sum(each.kv_bytes_unshared - each.kv_bytes for each in counts)

    @property
    def totals(self) -> dict[str, int]:
        """For ``/server_info``; empty where prefixes are not shared."""
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


def _backends_of(model_runner: Any) -> list[Any]:
    """The shared-prefix backends that a model runner uses: none, one or two."""
    used = model_runner.attn_backend
    parts = [
        used,
        *(getattr(used, f"{x}_backend", None) for x in ("prefill", "decode")),
    ]
    return [part for part in parts if getattr(part, "shares_prefixes", False)]
