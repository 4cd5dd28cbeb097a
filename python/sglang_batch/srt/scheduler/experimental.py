"""The mechanisms whose gain no GPU has shown yet, all of them, by name.

Each is off unless a setting or a policy asks for it. ``docs/experimental.md`` describes them.
To remove one, delete its folder and its lines here.
"""

from __future__ import annotations

from typing import Any

from ...scheduling.length_backlog import LengthBacklogs
from ..compat.scheduler_types import ScheduleBatch
from ..overlap.overlap_choice import overlap_by_default
from ..overlap.overlapped_steps import OverlappedSteps
from .aligned.aligned_steps import AlignedSteps
from .step_hook import StepHook


def experimental_hooks(scheduler: Any) -> list[StepHook]:
    """What takes part in the steps of an ``OfflineScheduler``, which has its ``jobs``,
    ``kv_manager`` and ``sharing``."""
    hooks: list[StepHook] = []
    # The policies length-tree and length-aligned.
    backlogs = scheduler.jobs.make_backlog = LengthBacklogs(
        scheduler.jobs.kv_accounting
    )
    config = scheduler.server_args.offline_config
    if scheduler.jobs.offloader is not None and (
        config.prefetch_bytes or config.prefill_ahead_tokens
    ):
        hooks.append(AlignedSteps(scheduler, backlogs))
    overlap = overlap_by_default(scheduler)
    if overlap is not None:
        overlap.on_whole = scheduler.sharing.show_nothing
        hooks.append(OverlapHook(overlap))
    return hooks


class OverlapHook(StepHook):
    """Runs mixed steps as two forwards, as ``overlap`` decides."""

    def __init__(self, overlap: OverlappedSteps) -> None:
        self.overlap = overlap

    def before_forward(self, batch: ScheduleBatch) -> int:
        return self.overlap.announce(batch)

    @property
    def totals(self) -> dict[str, object]:
        return self.overlap.totals
