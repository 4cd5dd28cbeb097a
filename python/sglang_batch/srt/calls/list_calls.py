"""A call that carries several prompts is planned as one job.

``Engine.generate(prompts)``, lists POSTed to ``/generate``, ``/v1/completions``,
``/v1/embeddings`` and ``/v1/rerank``, ``score``, and ``n`` samples of one prompt all
reach SGLang's tokenizer manager as one request, which sends its prompts in the order of
the list. Here they are sent in the order of a plan. The rest stays SGLang's: the
checks, the order of the answers, streams, errors and aborts.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
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
from ..engine.sglang_engine import SGLangEngine
from . import call_items
from .call_items import CallItem, Message, engine_of

logger = logging.getLogger(__name__)

# SGLang's setting for training frameworks that send prompts to all engines in one order.
_COLOCATED = "SGLANG_ENABLE_COLOCATED_BATCH_GEN"


def plan_list(
    original: Callable[..., AsyncGenerator[Any]],
    manager: Any,
    obj: Any,
    request: Any,
    request_states: dict[str, Any],
) -> AsyncGenerator[Any]:
    """AROUND hook on ``TokenizerManager._handle_batch_request``.

    Yields SGLang's answers: one list, or the items of a stream as they come. The first sample
    of a prompt reports which of its tokens were in the cache before all samples.
    """
    samples = int(getattr(obj, "parallel_sample_num", 1))
    if not _is_planned(obj, samples):
        return counted(original, manager, obj, request, request_states)
    answers = _planned(manager, obj, request, request_states, samples)
    return SampledPrompts(samples).counted(answers)


async def _planned(
    manager: Any,
    obj: Any,
    request: Any,
    request_states: dict[str, Any],
    samples: int,
) -> AsyncGenerator[Any]:
    messages = await _tokenize(manager, obj)
    # The ids that the request got, unless its client chose them.
    job_id, _, _ = ids.parse_request_id(messages[0].rid)
    if not is_of_a_job(messages[0].rid) or samples > 1:
        job_id = new_list_id()
    if samples > 1:
        items = _sample_items(manager, obj, messages, job_id, request_states)
    else:
        items = [CallItem(obj[i], message) for i, message in enumerate(messages)]
    for item in items:
        if getattr(item.obj, "return_prompt_token_ids", False):
            state = manager.rid_to_state[item.message.rid]
            state.prompt_token_ids = item.input_ids
    answers = [
        item.watch(manager._wait_one_response(item.obj, request)) for item in items
    ]
    async with _running(manager, job_id, items):
        if getattr(obj, "stream", False):
            rids = [item.message.rid for item in items]
            async for answer in manager._stream_batch_responses(answers, rids):
                yield answer
            return
        collected = await manager._collect_batch_responses(answers)
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


async def _tokenize(manager: Any, obj: Any) -> list[Message]:
    number = obj.batch_size
    if manager._should_use_batch_tokenization(number, obj):
        messages: list[Message] = await manager._batch_tokenize_and_process(number, obj)
        return messages
    return [await manager._tokenize_one_request(obj[i]) for i in range(number)]


def _sample_items(
    manager: Any,
    obj: Any,
    messages: Sequence[Message],
    job_id: str,
    request_states: dict[str, Any],
) -> list[CallItem]:
    """An item for each sample of each prompt, in place of SGLang's for the prompts, which first
    computes each prompt once. The plan has the samples share it anyway."""
    initial = {}
    for rid in obj.rid:
        state = request_states[rid]
        if manager.rid_to_state.get(rid) is state:
            del manager.rid_to_state[rid]
            state.lora_released = True  # the samples release the adapter
            initial[rid] = state
    items = []
    numbers = itertools.count()
    for i, message in enumerate(messages):
        prompt = obj[i]
        for _ in range(obj.parallel_sample_num):
            sample, own = copy.copy(prompt), copy.copy(message)
            sample.rid = own.rid = ids.engine_request_id(job_id, next(numbers))
            manager._init_req_state(sample)
            state = request_states[sample.rid] = manager.rid_to_state[sample.rid]
            own.time_stats = state.time_stats
            items.append(CallItem(sample, own))
        if prompt.rid in initial:
            initial[prompt.rid].time_stats.set_finished_time()
    return items


# The job --------------------------------------------------------------------------------


@asynccontextmanager
async def _running(
    manager: Any, job_id: str, items: Sequence[CallItem]
) -> AsyncGenerator[None]:
    """Run the items as a job in the background, until the block ends."""
    unsent = call_items.unsent_messages(manager)
    unsent.update({item.message.rid: item.message for item in items})
    job = asyncio.ensure_future(_run(manager, job_id, items))
    try:
        yield
        await job
    finally:
        for item in items:
            unsent.pop(item.message.rid, None)
        if not job.done():
            job.cancel()
            with suppress(asyncio.CancelledError):
                await job


async def _run(manager: Any, job_id: str, items: Sequence[CallItem]) -> None:
    unsent = call_items.unsent_messages(manager)
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
    original: Callable[..., AsyncGenerator[Any]],
    manager: Any,
    obj: Any,
    request: Any,
    request_states: dict[str, Any],
) -> AsyncGenerator[Any]:
    """SGLang's own ``TokenizerManager._handle_batch_request``, with its samples counted."""
    samples = int(getattr(obj, "parallel_sample_num", 1))
    found = SampledPrompts(samples)
    if samples > 1:
        manager = NotingPrompts(manager, found, obj.batch_size)
    return found.counted(original(manager, obj, request, request_states))


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


class NotingPrompts:
    """A tokenizer manager for SGLang's code that samples prompts, which computes each prompt in
    a request of its own first and drops what that reports.

    Everything is passed on to the real tokenizer manager.
    """

    def __init__(self, manager: Any, prompts: SampledPrompts, num_prompts: int) -> None:
        self._manager = manager
        self._prompts = prompts
        self._num_left = num_prompts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

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
