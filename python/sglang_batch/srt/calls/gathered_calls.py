"""Single calls of many tasks at the same time, planned as one job without an end.

Rollout frameworks send one request per sample, and evaluation harnesses 64 at a time.
With the setting ``gather_s``, requests wait that long for others. All that have no answer
yet are planned together, and the plan grows with each new group.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable, Container
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ...batch_api.protocol import INTERACTIVE_PRIORITY
from ...config import OfflineBatchConfig
from ...job.job_planner import JobPlanner
from ...planner.requests import UNKNOWN, Int32s, PlanRequests
from ...scheduling.job_plan import JobPlan
from ...store.token_spool import RootTokens, unshared_token
from ..engine.request_ids import GATHERED_ID, is_of_a_job
from ..engine.sglang_engine import SGLangEngine, namespace_of, shareable_len
from . import call_items as items
from .call_items import Message, engine_of

logger = logging.getLogger(__name__)

POLICY = "dfs"
# Calls with an answer that stay in the plan, so that it knows the prefixes of their groups.
MOST_ANSWERED = 1024
# Seconds after which it is looked whether all calls have their answers.
_CHECK_S = 1.0


async def gather(
    original: Callable[[Any, Message], Awaitable[None]], manager: Any, message: Message
) -> None:
    """AROUND hook on ``TokenizerManager._send_one_request``.

    Returns at once. The message is sent with the next group.
    """
    config: OfflineBatchConfig = manager.server_args.offline_config
    if (
        config.gather_s is None
        or is_of_a_job(message.rid)
        or message.rid in items.passing(manager)
        or getattr(message, "routed_dp_rank", None) is not None
        or not items.share_prefixes([message])
    ):
        return await original(manager, message)
    if not hasattr(manager, "offline_gathering"):
        manager.offline_gathering = _Gathering(manager, original, config)
    gathering: _Gathering = manager.offline_gathering
    gathering.add(message)
    return None


async def gather_one(
    original: Callable[[Any, list[Message]], Awaitable[None]],
    manager: Any,
    messages: list[Message],
) -> None:
    """AROUND hook on ``TokenizerManager._send_batch_request``: a list of one is a single call."""
    if manager.server_args.offline_config.gather_s is None or len(messages) > 1:
        await original(manager, messages)
    else:
        await manager._send_one_request(messages[0])


@dataclass(slots=True)
class _Call:
    """A call. sent: whether the scheduler has it.

    tokens: int32, the prompt as the planner gets it.
    known: whether it generates exactly ``max_new_tokens``.
    """

    rid: str
    tokens: Int32s
    max_new_tokens: int
    known: bool
    sent: bool = False


@dataclass(eq=False)
class _Gathering:
    """The open job of one tokenizer manager. send: SGLang's method for a message."""

    manager: Any
    send: Callable[[Any, Message], Awaitable[None]]
    config: OfflineBatchConfig

    def __post_init__(self) -> None:
        self._wait_s = self.config.gather_s or 0.0
        self._numbers = itertools.count()
        self._roots = RootTokens()
        # Calls without an answer, by number, and the last ones with an answer, whose
        # prefixes others may share.
        self._active: dict[int, _Call] = {}
        self._answered: dict[int, _Call] = {}
        self._new: dict[int, Message] = {}
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, message: Message) -> None:
        number = next(self._numbers)
        self._new[number] = message
        tokens = np.array(message.input_ids, np.int32)
        if len(tokens):
            tokens[0] = self._roots.of(namespace_of(message), int(tokens[0]))
        shared = shareable_len(message)
        if shared is not None and shared < len(tokens):
            tokens[shared] = unshared_token(number)
        self._active[number] = _Call(message.rid, tokens, *items.output_limits(message))
        items.unsent_messages(self.manager)[message.rid] = message
        self._arrived.set()
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while self._new:  # a call may arrive while the last job is closed
            await self._run_job()

    async def _run_job(self) -> None:
        """Send groups until no call is left. They are one job."""
        job_id = GATHERED_ID + uuid.uuid4().hex
        self._answered.clear()  # another job does not know them
        while self._new or self._forget_answered():
            if not self._new:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_CHECK_S):
                        await self._arrived.wait()
                continue
            await asyncio.sleep(self._wait_s)
            self._arrived.clear()
            await self._send_group(job_id)
        try:
            await (await engine_of(self.manager)).close_job(job_id)
        except Exception:  # calls that came meanwhile must be sent nevertheless
            logger.exception("Job %s of gathered calls was not closed", job_id)

    def _forget_answered(self) -> bool:
        """Whether calls are left once those with an answer are forgotten."""
        known = self.manager.rid_to_state
        over = [n for n, call in self._active.items() if call.rid not in known]
        for number in over:
            call = self._active.pop(number)
            if call.sent:  # the scheduler waits for all others of a plan
                self._answered[number] = call
        for number in list(self._answered)[:-MOST_ANSWERED]:
            del self._answered[number]
        return bool(self._active)

    async def _send_group(self, job_id: str) -> None:
        """Send the new calls, with a plan of all or as online requests without one."""
        new, self._new = self._new, {}
        try:
            await self._open(job_id, new)
        except Exception:
            logger.exception("%d calls could not be planned", len(new))
        unsent = items.unsent_messages(self.manager)
        for number, message in new.items():
            waits = unsent.pop(message.rid, None) is not None
            if waits and message.rid in self.manager.rid_to_state:  # not given up
                self._active[number].sent = True
                send = partial(self.send, self.manager)
                await items.send_or_refuse(self.manager, message, send)

    async def _open(self, job_id: str, new: dict[int, Message]) -> None:
        engine = await engine_of(self.manager)
        if not self._forget_answered():  # all were given up
            return
        calls = self._answered | self._active
        plans = await asyncio.to_thread(self._plans, engine, calls)
        rids = tuple(message.rid for message in new.values())
        await engine.open_job(job_id, plans, rids, next(iter(new)))
        await engine.set_priority(job_id, INTERACTIVE_PRIORITY)

    def _plans(self, engine: SGLangEngine, calls: dict[int, _Call]) -> list[JobPlan]:
        of = list(calls.values())
        requests = PlanRequests(
            tokens=np.concatenate([call.tokens for call in of]),
            offsets=np.cumsum([0, *(len(call.tokens) for call in of)], dtype=np.int64),
            max_new_tokens=np.array([call.max_new_tokens for call in of], np.int32),
            known_output_len=np.array(
                [call.max_new_tokens if call.known else UNKNOWN for call in of],
                np.int32,
            ),
        )
        config = replace(self.config, policy=POLICY)
        planner = JobPlanner(requests, np.array(list(calls)), engine.machine, config)
        plans = [shard.for_scheduler(engine.machine) for shard in planner.plans()]
        return [_for_calls(plan, self._active) for plan in plans]


def _for_calls(plan: JobPlan, active: Container[int]) -> JobPlan:
    """The plan of a job without an end, for the requests that are ``active``.

    The group with the most of them, which is least likely to get many more, comes first.
    """
    group = np.zeros(len(plan.parent), np.int64)
    for node in range(1, len(group)):
        parent = int(plan.parent[node])
        group[node] = group[parent] if parent else node
    # A request that shares nothing is a group of its own.
    of_leaf = np.where(
        plan.node > 0, group[plan.node], len(group) + np.arange(plan.num_requests)
    )
    waits = np.array([int(number) in active for number in plan.number])
    _, index = np.unique(of_leaf, return_inverse=True)
    size = np.bincount(index, weights=waits)[index]
    order = np.lexsort((np.arange(len(size)), of_leaf, -size))
    position = np.empty(len(order), np.int32)
    position[order] = np.arange(len(order), dtype=np.int32)
    return replace(plan, position=position, open_ended=True)
