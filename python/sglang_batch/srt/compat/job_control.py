"""The control message that opens, changes and closes a job in every scheduler, and the
question for the prefix trees of its open jobs.

SGLang's own channel broadcasts them. Each DP rank gets them, and all its TP ranks see them
at the same place between their requests, so that they decide alike.
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


class TreeQuery(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """Asks for the prefix trees of the open jobs.

    limit: most nodes of each DP rank's answer.
    """

    limit: int


class TreeQueryOutput(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """The answer of one DP rank: ``scheduling.running_tree.TreeNow`` as JSON."""

    dp_rank: int
    tree: bytes


hook_custom_types(JobControl, JobControlOutput, TreeQuery, TreeQueryOutput)


def communicator(tokenizer_manager: TokenizerManager) -> ControlChannel:
    """The channel on which a tokenizer manager sends :class:`JobControl` messages.

    There is one for each manager, since answers go to the first channel that was
    registered for them.
    """
    if not hasattr(tokenizer_manager, "offline_job_control"):
        channel = _channel(tokenizer_manager, JobControlOutput)
        tokenizer_manager.offline_job_control = channel
    return tokenizer_manager.offline_job_control


def tree_channel(tokenizer_manager: TokenizerManager) -> ControlChannel:
    """The same for :class:`TreeQuery` messages."""
    if not hasattr(tokenizer_manager, "offline_tree_queries"):
        channel = _channel(tokenizer_manager, TreeQueryOutput)
        tokenizer_manager.offline_tree_queries = channel
    return tokenizer_manager.offline_tree_queries


def _channel(tokenizer_manager: TokenizerManager, answers: type) -> ControlChannel:
    channel: ControlChannel = FanOutCommunicator(
        tokenizer_manager._dispatch_to_scheduler, get_parallel().num_dp_ranks
    )
    tokenizer_manager._result_dispatcher += TypeBasedDispatcher(
        [(answers, channel.handle_recv)]
    )
    return channel
