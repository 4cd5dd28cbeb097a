"""The mechanisms whose gain no GPU has shown yet, all of them, by name.

Each is off unless a setting or a policy asks for it. ``docs/experimental.md`` describes them.
To remove one, delete its folder and its lines here.
"""

from __future__ import annotations

from typing import Any

from ...scheduling.length_backlog import LengthBacklogs
from ..overlap.overlap_choice import overlap_by_default
from ..overlap.overlapped_steps import OverlappedSteps


def add_experimental(scheduler: Any) -> OverlappedSteps | None:
    """Give an ``OfflineScheduler``, which has its ``jobs`` and ``sharing``, the policies
    length-tree and length-aligned, and what runs mixed steps as two forwards, if anything."""
    scheduler.jobs.make_backlog = LengthBacklogs(scheduler.jobs.kv_accounting)
    overlap = overlap_by_default(scheduler)
    if overlap is not None:
        overlap.on_whole = scheduler.sharing.show_nothing
    return overlap
