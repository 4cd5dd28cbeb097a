"""SGLang as the :class:`~sglang_batch.job.engine.Engine` of a job."""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar, cast

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.runtime_context import get_memory
from transformers import PreTrainedTokenizerBase

from ...batch_api.protocol import TRANSCRIPTIONS_URL
from ...errors import EngineError
from ...job import traces
from ...job.engine import SAMPLE_URL, KvUse, ReplicaChanges
from ...planner.machine_model import Machine
from ...request import BatchRequestInput, RequestOutput, line_request_id
from ...scheduling.job_plan import JobPlan
from ...scheduling.running_tree import TreeNow
from ..compat import job_control as control
from ..compat.job_control import JobControl
from ..compat.server_types import (
    EngineRequest,
    JsonObject,
    TemplateManager,
    TokenizerManager,
)
from ..compat.support import STATE_KEY
from .checks.body_checks import parse_body
from .checks.request_checks import check_line
from .checks.stop_rule_checks import has_rules, take_rules
from .checks.value_checks import FieldError
from .endpoints import Converted, ServingEndpoints, load_request, store_request
from .machine import LearntMachine
from .media import check_sources, media_reader, media_token_ids
from .request_ids import is_job_id
from .responses import abort_reason, aborted, output_of, rejection, unusable
from .serving_call import HoldingManager, ServingCall
from .transcriptions import with_duration

# With fewer requests in flight the engine may run out of work between answers.
MIN_INFLIGHT = 1024
# Requests with images that are sent beyond those that can run. Their pixels are in memory.
MEDIA_AHEAD = 64
# Bytes of a request's body up to which rendering costs less than a thread for it, which
# must also wait for Python's lock to return the result.
SHORT_BODY = 4096


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request rendered by SGLang's serving class.

    adapted: SGLang's internal request, or the first of several.
    call: SGLang's serving code, held where it passes that request to the engine.
    converted: where the call can be taken up again, None where only from its start.
    """

    url: str
    rid: str
    adapted: EngineRequest
    call: ServingCall
    input_ids: list[int] | None
    max_new_tokens: int | None
    ignore_eos: bool
    converted: Converted | None = None

    @property
    def shareable_len(self) -> int | None:
        # Of models that attend to the whole text, nothing is cached.
        unshared = get_memory().disable_radix_cache
        return 0 if unshared else shareable_len(self.adapted)

    @property
    def has_media(self) -> bool:
        return self.adapted.contains_mm_input()

    @property
    def adapter(self) -> str:
        return _of_first(self.adapted.lora_path) or ""

    @property
    def namespace(self) -> str:
        return namespace_of(self.adapted)


class SGLangEngine:
    """Serves a job's requests with SGLang's tokenizer manager, in its process and on its event
    loop, in the HTTP server as with ``sglang.Engine``.

    learnt: its machine, by steps that SGLang's schedulers time. None until it is connected.
    manager: SGLang's tokenizer manager.
    find_pairing: the :class:`~..disaggregation.pairing.Pairing` of a tokenizer manager
        with prefill servers, or None. Set by the plugin.
    """

    find_pairing: ClassVar[Callable[[Any], Any]] = staticmethod(lambda _: None)
    replica_changes: ReplicaChanges | None = None

    def __init__(
        self, manager: TokenizerManager, template_manager: TemplateManager | None
    ) -> None:
        self.manager = manager
        holding = HoldingManager(manager)
        self._endpoints = ServingEndpoints(holding, template_manager)
        self.default_max_inflight = MIN_INFLIGHT
        self.max_running_requests = 0
        self._media_room = asyncio.Semaphore(MEDIA_AHEAD)
        self.learnt: LearntMachine | None = None
        self._job_control: Callable[[JobControl], Any] | None = None
        self.num_replicas = 1
        self._running_query: asyncio.Future[dict[str, float]] | None = None
        # The plans of open jobs that the schedulers have.
        self._last_plans: dict[str, Sequence[JobPlan]] = {}
        self._pairing = SGLangEngine.find_pairing(manager)
        self._early_ends = EarlyEnds(manager)

    @property
    def model_names(self) -> tuple[str, ...]:
        # SGLang renames the model after the path of new weights.
        manager = self.manager
        first = manager.server_args.served_model_name or manager.served_model_name
        return tuple(dict.fromkeys((first, manager.served_model_name)))

    @property
    def is_paused(self) -> bool:
        return self.manager.is_pause

    @property
    def machine(self) -> Machine:
        if self.learnt is None:
            raise EngineError("The engine is not connected; await connect() first.")
        return self.learnt.machine

    @property
    def is_connected(self) -> bool:
        return self.learnt is not None

    @property
    def closing(self) -> bool:
        """Whether SGLang is shutting down and only waits for running requests."""
        return self.manager.gracefully_exit

    async def connect(self) -> None:
        """Read the state of every scheduler: check that it is ours, get its limits.

        Raises:
            EngineError: a scheduler runs without our hooks.
        """
        if self._pairing is not None:
            self._pairing.servers.start()
        states = await self.manager.get_internal_state()
        for rank, state in enumerate(states):
            if STATE_KEY not in state:
                raise EngineError(
                    f"--offline-batch: the scheduler of DP rank {rank} runs without "
                    "sglang-batch; is the package installed on every node?"
                )
        running = sum(
            int(state.get("effective_max_running_requests_per_dp") or 0)
            for state in states
        )
        self.max_running_requests = running
        self._media_room = asyncio.Semaphore(running + MEDIA_AHEAD)
        self.default_max_inflight = max(MIN_INFLIGHT, 2 * running)
        self.learnt = LearntMachine(self.manager, states[0])
        self.num_replicas = len(states)
        if "jobs" in states[0][STATE_KEY]:  # not with SGLang's own scheduler
            channel = control.channel_of(self.manager, control.JobControlOutput)
            self._job_control = channel

    async def kv_use(self) -> KvUse | None:
        if self._job_control is None:
            return None  # SGLang's own scheduler has no sides
        states = await self.manager.get_internal_state()
        total: Counter[str] = Counter()
        for state in states:
            total.update(state[STATE_KEY]["kv_use"])
        return KvUse(**total)

    async def running_tree(self, limit: int) -> list[TreeNow] | None:
        if self._job_control is None:
            return None  # SGLang's own scheduler has no plan
        channel = control.channel_of(self.manager, control.TreeQueryOutput)
        answers: list[Any] = await channel(control.TreeQuery(limit=limit))
        answers.sort(key=lambda answer: answer.dp_rank)
        return [json.loads(answer.tree) for answer in answers]

    async def running_s(self) -> dict[str, float]:
        # Many lines ask at the same time. They share an answer.
        if self._running_query is None or self._running_query.done():
            self._running_query = asyncio.ensure_future(self._ask_running_s())
        return await asyncio.shield(self._running_query)

    async def _ask_running_s(self) -> dict[str, float]:
        channel = control.channel_of(self.manager, control.RunningQueryOutput)
        answers = await channel(control.RunningQuery())
        return longest_of_lines(answer.seconds for answer in answers)

    async def open_job(
        self,
        job_id: str,
        plans: Sequence[JobPlan],
        names: tuple[str, ...] = (),
        first: int = 0,
    ) -> None:
        """Announce a job, or a new plan for it.

        Args:
            names: ids of its requests from number ``first`` on, if these do not name
                the job themselves.

        Raises:
            ValueError: the id is not one of a job. Its requests would be taken for calls of
                clients, and be gathered or planned again.
        """
        if not names and not is_job_id(job_id):
            raise ValueError(
                f"job id {job_id!r} is not a prefix of ours and 32 hexadecimal digits; "
                "make it with request.named_job_id"
            )
        if self._pairing is not None:
            await self._pairing.open_job(job_id, plans)
        if self._job_control is None:
            return
        last = self._last_plans.pop(job_id, [])
        action, data = await asyncio.to_thread(_message, plans, last)
        message = JobControl(
            job_id=job_id,
            action=action,
            plans=data,
            names=names,
            first=first,
            reports=job_id in control.watchers(self.manager),
        )
        await self._job_control(message)
        self._last_plans[job_id] = plans

    def watch_job(self, job_id: str, on_joined: Callable[[list[int]], None]) -> bool:
        if self._job_control is None:
            return False
        control.watchers(self.manager)[job_id] = on_joined
        return True

    async def set_priority(self, job_id: str, priority: int) -> None:
        if self._pairing is not None:
            await self._pairing.servers.set_priority(job_id, priority)
        if self._job_control is not None:
            action = control.PRIORITY
            message = JobControl(job_id=job_id, action=action, priority=priority)
            await self._job_control(message)

    async def close_job(self, job_id: str) -> None:
        self._last_plans.pop(job_id, None)
        self._early_ends.forget(job_id)
        if self._pairing is not None:
            await self._pairing.servers.close_job(job_id)
        if self._job_control is not None:
            control.watchers(self.manager).pop(job_id, None)
            await self._job_control(JobControl(job_id=job_id, action=control.CLOSE))
            await self._learn_costs()

    async def _learn_costs(self) -> None:
        if self.learnt is None or self._last_plans:
            return
        # A job may be opened meanwhile.
        if await self.learnt.keep_steps() and not self._last_plans:
            await self.learnt.learn()

    async def prepare(
        self, request: BatchRequestInput, rid: str, *, tokenize: bool
    ) -> Prepared | RequestOutput:
        await self._endpoints.open(request.url)
        if request.url == TRANSCRIPTIONS_URL:
            try:
                reader = media_reader(self.manager)
                body = parse_body(request.body)
                request = await with_duration(request, body, reader)
            except Exception as error:
                return rejection(request.url, rid, error)
        if len(request.body) <= SHORT_BODY:
            await asyncio.sleep(0)  # let other tasks run between two requests
            prepared = self._prepare(request, rid, tokenize)
        else:
            # Templates and tokenizers take milliseconds, so off the event loop, as online.
            prepared = await asyncio.to_thread(self._prepare, request, rid, tokenize)
        if isinstance(prepared, RequestOutput) or not prepared.has_media:
            return prepared
        return await self._with_media(prepared, tokenize)

    async def _with_media(
        self, prepared: Prepared, tokenize: bool
    ) -> Prepared | RequestOutput:
        manager = self.manager
        try:
            allowed = manager.server_args.offline_config.media_sources
            check_sources(prepared.adapted, allowed)
            if not tokenize or manager.mm_processor is None:
                return prepared
            # They are read again once the request is sent, see HoldingManager.
            own = copy.copy(prepared.adapted)
            await media_reader(manager).read(own)
            ids = await media_token_ids(manager, own)
        except Exception as error:
            return rejection(prepared.url, prepared.rid, error)
        return replace(prepared, input_ids=ids)

    def _prepare(
        self, request: BatchRequestInput, rid: str, tokenize: bool
    ) -> Prepared | RequestOutput:
        url = request.url
        converted: list[Converted] = []
        body: JsonObject = {}
        try:
            body = parse_body(request.body)
            rules = take_rules(url, body)
            work = self._endpoints.call(url, body, converted.append)
            call = ServingCall(work, rid, rules)
            adapted = call.render()
            if adapted is None:
                return output_of(url, rid, call.answer, ())
            check_line(adapted, self.manager.model_config.vocab_size)
            input_ids = None
            if tokenize and not adapted.contains_mm_input():
                input_ids = self._first_prompt_ids(adapted)
        except (AttributeError, LookupError) as error:
            # SGLang's code raises these for a body of the wrong shape.
            return rejection(url, rid, ValueError(f"The body cannot be used: {error}"))
        except FieldError as error:
            return rejection(url, rid, error.as_sent(body))
        except Exception as error:
            return rejection(url, rid, error)
        limits = _output_limits(adapted)
        kept = converted[0] if converted else None
        return Prepared(url, rid, adapted, call, input_ids, *limits, kept)

    def stored(self, prepared: Prepared) -> bytes | None:
        converted = prepared.converted
        # Serving code that composes its requests converts a body into something else.
        if converted is None or converted[0] is not prepared.adapted:
            return None
        return store_request(
            converted, prepared.input_ids, prepared.max_new_tokens, prepared.ignore_eos
        )

    def restore(
        self,
        request: BatchRequestInput,
        rid: str,
        stored: bytes,
        input_ids: Sequence[int],
    ) -> Prepared:
        converted, found = load_request(stored, input_ids)
        call = ServingCall(self._endpoints.continued(request.url, converted), rid)
        adapted = call.render()
        if adapted is None:
            raise EngineError(
                f"{request.custom_id}: it was rendered, and now it is not."
            )
        limits = found.max_new_tokens, found.ignore_eos
        return Prepared(request.url, rid, adapted, call, None, *limits)

    async def execute(
        self, prepared: Prepared, replica: int | None = None
    ) -> RequestOutput:
        async with self._media_room if prepared.has_media else nullcontext():
            if self._pairing is None:
                return await self._execute(prepared, replica)
            output: RequestOutput = await self._pairing.execute(
                prepared.rid, lambda: self._execute(prepared, replica)
            )
            return output

    async def _execute(self, prepared: Prepared, replica: int | None) -> RequestOutput:
        call = prepared.call
        sent: JsonObject = {"routed_dp_rank": replica} if self.num_replicas > 1 else {}
        if trace := traces.headers():
            sent["external_trace_header"] = trace
        failure: Exception | None = None
        answer: object = None
        with self._early_ends.executing(prepared.rid):
            try:
                answer = await call.run(**sent)
            except Exception as error:
                failure = error
        url, rid = prepared.url, prepared.rid
        engine_answers = [submission.answer for submission in call.submissions]
        # First, because serving code takes an aborted answer for one, or fails on it.
        reason = None if url == SAMPLE_URL else abort_reason(engine_answers)
        if reason is not None:
            return aborted(url, rid, reason)
        # A request that failed early has no size.
        num_prompts = [getattr(s.adapted, "batch_size", 1) for s in call.submissions]
        if failure is None:
            try:
                output = output_of(url, rid, answer, engine_answers, num_prompts)
            except Exception as error:  # JSON cannot encode it
                failure = error
        if failure is not None:
            output = rejection(url, rid, failure)
        # Nothing was refused: the last request was answered.
        if not output.ok and engine_answers[-1] is not None:
            return unusable(url, output, failure, engine_answers, num_prompts)
        return output

    def end_early(self, rid: str) -> None:
        self._early_ends.end(rid)

    def _first_prompt_ids(self, adapted: EngineRequest) -> list[int]:
        """Token ids of a request's first prompt, empty if it has no text."""
        ids = adapted.input_ids
        if ids:
            first = ids[0]
            return first if isinstance(first, list) else cast("list[int]", ids)
        text = adapted.text[0] if isinstance(adapted.text, list) else adapted.text
        tokenizer = self.manager.tokenizer
        if not text or tokenizer is None:
            return []
        found = text_token_ids(tokenizer, text)
        if found and isinstance(adapted, GenerateReqInput) and text is adapted.text:
            # SGLang need not tokenize it again.
            adapted.text, adapted.input_ids = None, found
        return found


def _message(
    plans: Sequence[JobPlan], last: Sequence[JobPlan]
) -> tuple[str, tuple[bytes, ...]]:
    """The action and the data of a control message: no more than has changed."""
    pairs = list(zip(plans, last, strict=False))
    if len(pairs) == len(plans) and all(new.same_requests(old) for new, old in pairs):
        return control.CHANGE, tuple(new.changes_from(old) for new, old in pairs)
    return control.OPEN, tuple(plan.to_bytes() for plan in plans)


def longest_of_lines(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of the requests in some reports, by line: of its longest request."""
    longest: dict[str, float] = {}
    for rid, seconds in chain.from_iterable(each.items() for each in reports):
        line = line_request_id(rid)
        longest[line] = max(seconds, longest.get(line, 0.0))
    return longest


def text_token_ids(
    tokenizer: PreTrainedTokenizerBase, text: str | list[str]
) -> list[int]:
    """Token ids of a prompt, which is a pair of texts for a cross-encoder."""
    pair = [text] if isinstance(text, str) else text
    return list(tokenizer(*pair)["input_ids"])


def shareable_len(request: Any) -> int | None:
    """Most tokens of the first prompt of SGLang's request, or of its message to the
    scheduler, that may come from the cache.

    SGLang computes the log probabilities of a prompt from the token on that
    ``logprob_start_len`` names. None if all tokens may come from the cache.
    """
    wanted = _of_first(getattr(request, "return_logprob", None))
    start = _of_first(getattr(request, "logprob_start_len", None))
    # A value of another type is the request's error, once it is sent.
    return start if wanted and isinstance(start, int) and start >= 0 else None


def namespace_of(request: Any) -> str:
    """The part of the cache's keys of a request's first prompt that is not its tokens."""
    keys = [_of_first(getattr(request, name, None)) for name in _CACHE_KEYS]
    return repr(keys) if any(keys) else ""


# A request names its adapter by ``lora_path``, a message by ``lora_id``.
_CACHE_KEYS = ("cache_salt", "extra_key", "lora_path", "lora_id")


def _of_first(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return value[0] if value else None


def _output_limits(adapted: EngineRequest) -> tuple[int | None, bool]:
    """Most tokens that a request may generate, and whether it generates exactly these."""
    if not isinstance(adapted, GenerateReqInput):
        return 1, True  # an embedding: only its prompt is computed
    params = adapted.sampling_params or {}
    params = _of_first(params)
    most = params.get("max_new_tokens")
    if most in (0, 1):
        return 1, True  # a prompt's logprobs, or one token: it cannot end earlier
    exact = bool(params.get("ignore_eos")) and not has_rules(params)
    return most, exact and most is not None


# Seconds between two looks whether a request that is to end was sent.
_NOT_SENT_S = 0.01


class EarlyEnds:
    """The samples of one tokenizer manager that are to end, before and while they run."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        # The present request of each sample, by the id of its first one.
        self._executing: dict[str, str] = {}
        self._wanted: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def end(self, rid: str) -> None:
        """End a sample now, or as soon as it is sent."""
        line = line_request_id(rid)
        if line not in self._wanted:
            self._wanted.add(line)
            if line in self._executing:
                self._begin(line)

    @contextmanager
    def executing(self, rid: str) -> Iterator[None]:
        """A request is executed in this block."""
        line = line_request_id(rid)
        self._executing[line] = rid
        if line in self._wanted:
            self._begin(line)
        try:
            yield
        finally:
            del self._executing[line]

    def forget(self, job_id: str) -> None:
        """No more samples of a job will be executed."""
        begin = f"{job_id}-"
        self._wanted = {line for line in self._wanted if not line.startswith(begin)}

    def _begin(self, line: str) -> None:
        task = asyncio.ensure_future(self._end(line, self._executing[line]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self, line: str, rid: str) -> None:
        # SGLang forgets the abort of a request that its scheduler does not have yet, as
        # when it waits for new weights, for a pause to end, or for its prompt.
        while self._executing.get(line) == rid:
            state = self._manager.rid_to_state.get(rid)
            if state is not None and state.dispatched:
                self._manager.abort_request(rid)
                return
            await asyncio.sleep(_NOT_SENT_S)
