"""A call that carries several prompts is planned as one job.

``Engine.generate(prompts)``, lists POSTed to ``/generate``, ``/v1/completions``,
``/v1/embeddings`` and ``/v1/rerank``, ``score``, and ``n`` samples of one prompt all
reach SGLang's tokenizer manager as one request, which sends its prompts in the order of
the list. Here they are sent in the order of a plan. The rest stays SGLang's: the
checks, the order of the answers, streams, errors and aborts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from sglang.srt.utils import get_bool_env_var

from ... import request as ids
from ...batch_api.protocol import INTERACTIVE_PRIORITY
from ...job.engine import GENERATE_URL, ForwardingEngine, PreparedRequest
from ...job.job import Job, JobOptions
from ...request import BatchRequestInput, RequestOutput
from ...scheduling.job_plan import JobPlan
from ..compat.server_types import EngineAnswer, EngineRequest, JsonObject
from ..engine.request_ids import has_our_id, is_of_a_job, new_list_id
from ..engine.serving_call import PassingManager
from ..engine.sglang_engine import SGLangEngine
from . import call_items
from .call_items import CallItem, Message, engine_of

logger = logging.getLogger(__name__)

# SGLang's setting for training frameworks that send prompts to all engines in one order.
_COLOCATED = "SGLANG_ENABLE_COLOCATED_BATCH_GEN"


def plan_list(
    original: Callable[..., AsyncGenerator[Any]], manager: Any, obj: Any, *others: Any
) -> AsyncGenerator[Any]:
    """AROUND hook on ``TokenizerManager._handle_batch_request``.

    Yields SGLang's answers: one list, or the items of a stream as they come. The first sample
    of a prompt reports which of its tokens were in the cache before all samples.
    """
    samples = int(getattr(obj, "parallel_sample_num", 1))
    if not _is_planned(obj, samples):
        return counted(original, manager, obj, *others)
    answers = _planned(original, manager, obj, *others)
    return SampledPrompts(samples).counted(answers)


async def _planned(
    original: Callable[..., AsyncGenerator[Any]], manager: Any, obj: Any, *others: Any
) -> AsyncGenerator[Any]:
    planned = PlannedPrompts(manager, obj)
    answers = original(planned, obj, *others)
    async with planned.running(), aclosing(answers):
        if getattr(obj, "stream", False):
            async for answer in answers:
                yield answer
            return
        collected = await anext(answers)
    # Engine.generate takes one answer and leaves the generator where it is.
    yield collected


def _is_planned(obj: Any, samples: int) -> bool:
    return (
        obj.batch_size * samples > 1
        and not has_our_id(obj)
        and getattr(obj, "routed_dp_rank", None) is None
        and not obj.contains_mm_input()
        and not get_bool_env_var(_COLOCATED)
    )


class PlannedPrompts(PassingManager):
    """Holds the messages of a call until all are there, and sends them in the order of a
    plan."""

    def __init__(self, manager: Any, obj: Any) -> None:
        super().__init__(manager)
        samples = int(getattr(obj, "parallel_sample_num", 1))
        self._number = obj.batch_size * samples
        # SGLang first computes each prompt that has samples in a request of its own. The
        # plan has the samples share it anyway.
        self._num_skipped = obj.batch_size if samples > 1 else 0
        self._messages: dict[str, Message] = {}
        self._items: list[CallItem] = []
        self._job: asyncio.Future[None] | None = None

    async def _send_one_request(self, message: Message) -> None:
        self._messages[message.rid] = message

    async def _send_batch_request(self, messages: Sequence[Message]) -> None:
        self._messages |= {message.rid: message for message in messages}

    def _wait_one_response(
        self, obj: EngineRequest, request: Any = None
    ) -> AsyncGenerator[Any]:
        message = self._messages.pop(str(obj.rid))
        if self._num_skipped:
            self._num_skipped -= 1
            return self._skipped(message.rid)
        item = CallItem(obj, message)
        self._items.append(item)
        if len(self._items) == self._number:
            unsent = call_items.unsent_messages(self._manager)
            unsent.update({item.message.rid: item.message for item in self._items})
            self._job = asyncio.ensure_future(_run(self._manager, self._items))
        return item.watch(self._manager._wait_one_response(obj, request))

    async def _skipped(self, rid: str) -> AsyncGenerator[Any]:
        del self._manager.rid_to_state[rid]
        yield None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """The block in which SGLang answers the call. The job ends with it."""
        try:
            yield
            if self._job is not None:
                await self._job
        finally:
            unsent = call_items.unsent_messages(self._manager)
            for item in self._items:
                unsent.pop(item.message.rid, None)
            if self._job is not None and not self._job.done():
                self._job.cancel()
                with suppress(asyncio.CancelledError):
                    await self._job


# The job --------------------------------------------------------------------------------


async def _run(manager: Any, items: Sequence[CallItem]) -> None:
    unsent = call_items.unsent_messages(manager)
    # The ids that the request got, unless its client or SGLang chose them.
    job_id, _, _ = ids.parse_request_id(items[0].message.rid)
    if not is_of_a_job(items[0].message.rid):
        job_id = new_list_id()
    try:
        if call_items.share_prefixes([item.message for item in items]):
            engine = _ListEngine(await engine_of(manager), manager, items)
            config = replace(
                manager.server_args.offline_config,
                max_line_attempts=1,
                line_timeout_s=None,
            )
            requests = [
                BatchRequestInput(index, item.message.rid, GENERATE_URL, b"")
                for index, item in enumerate(items)
            ]
            options = JobOptions(priority=INTERACTIVE_PRIORITY)
            # The caller gets each answer from SGLang.
            numbers, ignored = range(len(items)), lambda *_: None
            job = Job(job_id, requests, numbers, engine, config, ignored, options)
            return await job.run()
    except Exception:
        logger.exception("A list of %d prompts could not be planned", len(items))
    for item in items:
        if unsent.pop(item.message.rid, None) is not None:
            await call_items.send(manager, item.message)


class _ListEngine(ForwardingEngine):
    """Sends the messages of a call. Only the scheduler's part of a job is left to do."""

    def __init__(
        self, engine: SGLangEngine, manager: Any, items: Sequence[CallItem]
    ) -> None:
        super().__init__(engine)
        self._sglang = engine
        self._manager = manager
        self._items = items
        # Of clients' own ids the scheduler learns when the job opens.
        rids = tuple(item.message.rid for item in items)
        self._names = () if is_of_a_job(rids[0]) else rids

    async def open_job(self, job_id: str, plans: Sequence[JobPlan]) -> None:
        names, self._names = self._names, ()
        await self._sglang.open_job(job_id, plans, names)

    async def prepare(
        self, request: BatchRequestInput, rid: str, *, tokenize: bool
    ) -> PreparedRequest:
        return self._items[request.index]

    def stored(self, prepared: Any) -> bytes | None:
        return None  # it is in memory, and is not prepared by anyone

    async def execute(self, prepared: Any, replica: int | None = None) -> RequestOutput:
        message = prepared.message
        if call_items.unsent_messages(self._manager).pop(message.rid, None) is not None:
            if replica is not None:
                message.routed_dp_rank = replica
            await call_items.send(self._manager, message)
        output: RequestOutput = await asyncio.shield(prepared.over)
        return output


def counted(
    original: Callable[..., AsyncGenerator[Any]], manager: Any, obj: Any, *others: Any
) -> AsyncGenerator[Any]:
    """SGLang's own ``TokenizerManager._handle_batch_request``, with its samples counted."""
    samples = int(getattr(obj, "parallel_sample_num", 1))
    found = SampledPrompts(samples)
    if samples > 1:
        manager = NotingPrompts(manager, found, obj.batch_size)
    return found.counted(original(manager, obj, *others))


class SampledPrompts:
    """The cached tokens of the prompts of one call, each with the same number of samples.

    A prompt with several samples counts once, and usage has it from its first sample. That
    is not always the one that computes the prompt: SGLang has a request of its own do it,
    which has no answer, and with a plan any of the samples may be first.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        # By prompt, the fewest cached tokens that one of its requests reported.
        self._cached: dict[int, int] = {}
        self._num_computed = 0

    def computed_first(self, answer: JsonObject) -> None:
        """The request that computed the next prompt, before its samples, has ended."""
        self._note(self._num_computed, answer)
        self._num_computed += 1

    async def counted(self, answers: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        """The answers of the call, in which each prompt counts once."""
        async with aclosing(answers):
            async for answer in answers:
                if self._samples > 1:
                    self._count(answer)
                yield answer

    def _count(self, answers: EngineAnswer) -> None:
        """Correct the cached tokens of each prompt's first sample.

        answers: of all samples in order, or one of a stream, with its ``index`` in it.
        """
        found: list[Any] = answers if isinstance(answers, list) else [answers]
        placed = [
            (answer.get("index", place), answer)
            for place, answer in enumerate(found)
            if answer is not None
        ]
        for index, answer in placed:
            self._note(index // self._samples, answer)
        for index, answer in placed:
            prompt = index // self._samples
            if index % self._samples == 0 and prompt in self._cached:
                answer["meta_info"]["cached_tokens"] = self._cached[prompt]

    def _note(self, prompt: int, answer: Any) -> None:
        cached = answer["meta_info"].get("cached_tokens")
        if cached is not None:
            least = min(cached, self._cached.get(prompt, cached))
            self._cached[prompt] = least


class NotingPrompts(PassingManager):
    """Notes what SGLang's code drops: the answers of the requests that compute a prompt before
    its samples."""

    def __init__(self, manager: Any, prompts: SampledPrompts, num_prompts: int) -> None:
        super().__init__(manager)
        self._prompts = prompts
        self._num_left = num_prompts

    def _wait_one_response(
        self, obj: EngineRequest, request: Any = None
    ) -> AsyncGenerator[Any]:
        answers: AsyncGenerator[Any]
        answers = self._manager._wait_one_response(obj, request)
        if not self._num_left:
            return answers  # a sample's
        self._num_left -= 1
        return self._noting(answers)

    async def _noting(self, answers: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        async with aclosing(answers):
            async for answer in answers:
                self._prompts.computed_first(answer)
                yield answer
