"""Chooses the requests that join the next step, and the number of prompt tokens.

A step has the decodes of all running requests, and prompt tokens. Orders that are
followed fill every step up to its limit (``step_filling``). The dual scanner takes requests
from both ends of an order (``both_ends``).

The jobs of one priority are scanned together. The next request is that of the job with the
least work, done or begun (``job_work``). Nobody overtakes it until it fits, so a request
that needs much KV does not starve. Then the other jobs join until they had as much. If
one of the jobs is taken from both ends, there is one budget of density for all. A job
that it puts behind the others by the prompts of a full step catches up without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...planner.requests import LEFT
from ..job_state import JobState
from ..kv_accounting import KvAccounting
from ..open_jobs import ScanPace
from ..scheduled_request import ScheduledRequest
from .both_ends import take_from_both_ends
from .step_filling import Choice, EngineNow, Filling


def choose(
    jobs: Sequence[JobState],
    kv_accounting: KvAccounting,
    now: EngineNow,
    scan: ScanPace,
) -> Choice:
    """Fill the next step from the jobs of one priority.

    The chosen requests leave the backlog and count as running. :func:`put_back` reverts
    that for a request that could not join after all.
    """
    filling = Filling(jobs, kv_accounting, now)
    limit = now.prompt_tokens
    waiting = [job for job in jobs if job.backlog.count]
    if any(job.dual for job in waiting or jobs):
        take_from_both_ends(filling, limit, scan)
    else:
        filling.continue_chunk(limit)
        filling.take(LEFT, limit, 0)
        filling.take_ahead(limit)
    choice = filling.choice
    if choice.tokens == 0 and now.decode_rows == 0:
        filling.continue_chunk(max(limit, now.page_size))
    filling.release_held()
    return choice


def put_back(
    job: JobState, kv_accounting: KvAccounting, request: ScheduledRequest
) -> None:
    """Return a chosen request that could not join to the backlog."""
    kv_accounting.undo_admit(request)
    if request.leaf >= 0:
        job.leave(request, offloaded=True)
    job.backlog.add(request)
