"""The control message that opens, changes and closes a job in every scheduler, reports of
the schedulers about it, and questions about their present work.

SGLang's own channel broadcasts them. Each DP rank gets them, and all its TP ranks see them
at the same place between their requests, so that they decide alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import BaseReq, hook_custom_types
from sglang.utils import TypeBasedDispatcher

from .server_types import TokenizerManager

OPEN, CHANGE, PRIORITY, CLOSE = "open", "change", "priority", "close"


class JobControl(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """Opens, changes or closes a job.

    plans: for each DP rank, a :class:`~sglang_batch.scheduling.job_plan.JobPlan` to open
        a job or to extend it, or the changes from the last one; else empty.
    names: ids of the job's requests from number ``first`` on, if they do not name the
        job themselves.
    priority: among open jobs, requests of the job with the highest join first.
    reports: whether each DP rank tells which of the job's requests have joined.
    """

    job_id: str
    action: str
    plans: tuple[bytes, ...] = ()
    names: tuple[str, ...] = ()
    first: int = 0
    priority: int = 0
    reports: bool = False


class JobControlOutput(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """One DP rank has done so."""


class JobJoined(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """Requests of a job that joined a step of one DP rank.

    numbers: their numbers in the job, int32.
    """

    job_id: str
    numbers: bytes


class TreeQuery(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """Asks for the prefix trees of the open jobs.

    limit: most nodes of each DP rank's answer.
    """

    limit: int


class TreeQueryOutput(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """The answer of one DP rank: ``scheduling.running_tree.TreeNow`` as JSON."""

    dp_rank: int
    tree: bytes


class RunningQuery(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """Asks for how long each request has been running."""


class RunningQueryOutput(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """The answer of one DP rank: seconds since each request's first step, by id."""

    seconds: dict[str, float]


class StepsQuery(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """Asks for the seconds of steps."""


class StepsQueryOutput(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """The answer of one DP rank: the last steps of each kind since the last question.

    samples: the fields of each ``StepSample``, one after the other.
    """

    samples: list[float]


hook_custom_types(
    *(JobControl, JobControlOutput, TreeQuery, TreeQueryOutput),
    *(RunningQuery, RunningQueryOutput, JobJoined, StepsQuery, StepsQueryOutput),
)


def channel_of(manager: TokenizerManager, answers: type) -> FanOutCommunicator:
    """The one channel on which a tokenizer manager sends messages with such answers.

    They go to the first channel that was registered for them.
    """
    channels: dict[type, FanOutCommunicator]
    channels = vars(manager).setdefault("offline_channels", {})
    if answers not in channels:
        channels[answers] = channel = FanOutCommunicator(
            manager._dispatch_to_scheduler,
            # Of its own engine: the published arguments are those of the engine started last.
            manager.elastic_worker_count,
        )
        manager._result_dispatcher += TypeBasedDispatcher(
            [(answers, channel.handle_recv)]
        )
    return channels[answers]


Watchers = dict[str, Callable[[list[int]], None]]


def watchers(manager: TokenizerManager) -> Watchers:
    """By job, the function that gets the numbers of requests that joined a step."""
    watching: Watchers | None = vars(manager).get("offline_watchers")
    if watching is None:
        watching = vars(manager)["offline_watchers"] = {}
        joined = partial(_joined, watching)
        manager._result_dispatcher += TypeBasedDispatcher([(JobJoined, joined)])
    return watching


def _joined(watching: Watchers, message: JobJoined) -> None:
    if (on_joined := watching.get(message.job_id)) is not None:
        on_joined(np.frombuffer(message.numbers, np.int32).tolist())
