"""Jobs whose requests all reach the scheduler before its first step."""

from __future__ import annotations

import asyncio
from typing import Any

from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
)

from sglang_batch.job.job import Job


async def run_all_at_once(job: Job, count: int, manager: Any) -> None:
    """Run a job of ``count`` requests, all of which may be in flight at the same time."""
    # Past the tokenizer manager, which would hold requests back, too.
    manager._dispatch_to_scheduler(PauseGenerationReqInput(mode="in_place"))
    running = asyncio.ensure_future(job.run())
    states = manager.rid_to_state
    while not running.done():
        if sum(state.dispatched for state in states.values()) == count:
            break
        await asyncio.sleep(0.02)
    # The scheduler answers in the order of its messages.
    await manager.get_internal_state()
    manager._dispatch_to_scheduler(ContinueGenerationReqInput())
    await running
