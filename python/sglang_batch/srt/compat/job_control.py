"""The control message that opens, changes and closes a job in every scheduler.

SGLang's own channel broadcasts it. Each DP rank gets it, and all its TP ranks see it at
the same place between their requests, so that they decide alike.
"""

from __future__ import annotations

from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import BaseReq, hook_custom_types
from sglang.srt.runtime_context import get_parallel
from sglang.utils import TypeBasedDispatcher

from .server_types import ControlChannel, TokenizerManager

OPEN, CHANGE, PRIORITY, CLOSE = "open", "change", "priority", "close"


class JobControl(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """Opens, changes or closes a job.

    plans: for each DP rank, a :class:`~sglang_batch.scheduling.job_plan.JobPlan` to open
        a job or to extend it, or the changes from the last one; else empty.
    names: ids of the job's requests from number ``first`` on, if they do not name the
        job themselves.
    priority: among open jobs, requests of the job with the highest join first.
    """

    job_id: str
    action: str
    plans: tuple[bytes, ...] = ()
    names: tuple[str, ...] = ()
    first: int = 0
    priority: int = 0


class JobControlOutput(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """The answer of one DP rank: the number of the job's requests that it still has."""

    job_id: str
    num_requests: int = 0


hook_custom_types(JobControl, JobControlOutput)


def communicator(tokenizer_manager: TokenizerManager) -> ControlChannel:
    """The channel on which a tokenizer manager sends :class:`JobControl` messages.

    There is one for each manager, since answers go to the first channel that was
    registered for them.
    """
    if hasattr(tokenizer_manager, "offline_job_control"):
        return tokenizer_manager.offline_job_control
    channel: ControlChannel = FanOutCommunicator(
        tokenizer_manager._dispatch_to_scheduler, get_parallel().num_dp_ranks
    )
    tokenizer_manager._result_dispatcher += TypeBasedDispatcher(
        [(JobControlOutput, channel.handle_recv)]
    )
    tokenizer_manager.offline_job_control = channel
    return channel
