"""The control message that opens, changes and closes a job in every scheduler.

It is broadcast by SGLang's own channel: each DP rank gets it, and all TP ranks of one
see it at the same place between their requests, so that they decide alike.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import BaseReq, hook_custom_types
from sglang.srt.runtime_context import get_parallel
from sglang.utils import TypeBasedDispatcher

OPEN, PRIORITY, CLOSE = "open", "priority", "close"


class JobControl(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """``plans``: a pickled :class:`~sglang_batch.scheduling.job_plan.JobPlan` for each
    DP rank; empty but to open. ``priority``: among open jobs, higher goes first."""

    job_id: str
    action: str
    plans: tuple[bytes, ...] = ()
    priority: int = 0


class JobControlOutput(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """What one DP rank answers: how many of the job's requests it still has."""

    job_id: str
    num_requests: int = 0


hook_custom_types(JobControl, JobControlOutput)


def communicator(tokenizer_manager: Any) -> Any:
    """The channel on which a tokenizer manager sends :class:`JobControl` messages.

    One for each manager: answers go to the first that asked for them.
    """
    if (known := getattr(tokenizer_manager, "offline_job_control", None)) is not None:
        return known
    channel = FanOutCommunicator(
        tokenizer_manager._dispatch_to_scheduler, get_parallel().num_dp_ranks
    )
    tokenizer_manager._result_dispatcher += TypeBasedDispatcher(
        [(JobControlOutput, channel.handle_recv)]
    )
    tokenizer_manager.offline_job_control = channel
    return channel
