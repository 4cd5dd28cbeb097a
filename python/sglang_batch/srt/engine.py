"""SGLang as the :class:`~sglang_batch.engine.Engine` of a job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import HTTPException, Response
from pydantic import BaseModel, ValidationError
from sglang.srt.managers.io_struct import GenerateReqInput

from ..batch_api.lines import loads_lenient
from ..batch_api.protocol import error_body
from ..engine import GENERATE_URL
from ..errors import EngineError
from ..planner.plan import Machine
from ..request import BatchRequestInput, RequestOutput, Usage
from ..scheduling.job_plan import JobPlan
from . import job_control
from .endpoints import describe_validation_error, serving_endpoints
from .job_control import JobControl
from .machine import machine_of
from .request_ids import set_rid
from .scheduler import STATE_KEY

logger = logging.getLogger(__name__)

# Below this many requests in flight the engine may run out of work between answers.
MIN_INFLIGHT = 1024


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request rendered by SGLang's serving class.

    adapted: SGLang's internal request.
    parsed: the parsed body, from which the answer is built; None for /generate.
    """

    url: str
    rid: str
    adapted: Any
    parsed: BaseModel | None
    input_ids: list[int] | None
    max_new_tokens: int | None
    ignore_eos: bool


class SGLangEngine:
    """Serves a job's requests with SGLang's tokenizer manager, in its process.

    Works the same behind the HTTP server and behind ``sglang.Engine``; all calls
    must come from the event loop that the tokenizer manager runs on.
    """

    def __init__(self, tokenizer_manager: Any, template_manager: Any) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._endpoints = serving_endpoints(tokenizer_manager, template_manager)
        self._default_max_inflight = MIN_INFLIGHT
        self._machine: Machine | None = None
        self._job_control: Any = None
        self._num_replicas = 1

    @property
    def model_names(self) -> tuple[str, ...]:
        return (self._tokenizer_manager.served_model_name,)

    @property
    def default_max_inflight(self) -> int:
        return self._default_max_inflight

    @property
    def machine(self) -> Machine:
        if self._machine is None:
            raise EngineError("connect() comes before planning.")
        return self._machine

    @property
    def closing(self) -> bool:
        """Whether SGLang was asked to stop and waits for running requests only."""
        return bool(self._tokenizer_manager.gracefully_exit)

    async def connect(self) -> None:
        """Ask every scheduler for its state: check it is ours, learn its size.

        Raises:
            EngineError: a scheduler runs without our hooks.
        """
        states = await self._tokenizer_manager.get_internal_state()
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
        self._default_max_inflight = max(MIN_INFLIGHT, 2 * running)
        self._machine = machine_of(self._tokenizer_manager, states[0])
        self._num_replicas = len(states)
        if "jobs" in states[0][STATE_KEY]:  # not with SGLang's own scheduler
            self._job_control = job_control.communicator(self._tokenizer_manager)

    @property
    def num_replicas(self) -> int:
        return self._num_replicas

    async def open_job(self, job_id: str, plans: Sequence[JobPlan]) -> None:
        if self._job_control is not None:
            data = await asyncio.to_thread(lambda: [plan.to_bytes() for plan in plans])
            await self._job_control(
                JobControl(job_id=job_id, action=job_control.OPEN, plans=tuple(data))
            )

    async def close_job(self, job_id: str) -> None:
        if self._job_control is not None:
            await self._job_control(JobControl(job_id=job_id, action=job_control.CLOSE))

    async def prepare(
        self, request: BatchRequestInput, rid: str, *, tokenize: bool
    ) -> Prepared | RequestOutput:
        # Templates and tokenizers take milliseconds: off the event loop, as online.
        return await asyncio.to_thread(self._prepare, request, rid, tokenize)

    def _prepare(
        self, request: BatchRequestInput, rid: str, tokenize: bool
    ) -> Prepared | RequestOutput:
        try:
            body = _parse_body(request.body)
            if request.url == GENERATE_URL:
                adapted, parsed = GenerateReqInput(**body), None
            else:
                endpoint = self._endpoints[request.url]
                parsed = endpoint.request_class.model_validate(body)
                if message := endpoint.handler._validate_request(parsed):
                    raise ValueError(message)
                adapted, parsed = endpoint.handler._convert_to_internal_request(
                    parsed, None
                )
            set_rid(adapted, rid)
            input_ids = self._first_prompt_ids(adapted) if tokenize else None
        except Exception as error:
            return _rejection(rid, error)
        limits = _output_limits(adapted)
        return Prepared(request.url, rid, adapted, parsed, input_ids, *limits)

    async def execute(
        self, prepared: Prepared, replica: int | None = None
    ) -> RequestOutput:
        if self._num_replicas > 1:
            prepared.adapted.routed_dp_rank = replica
        try:
            if prepared.parsed is None:
                answer = await self._tokenizer_manager.generate_request(
                    prepared.adapted, None
                ).__anext__()
            else:
                handler = self._endpoints[prepared.url].handler
                answer = await handler._handle_non_streaming_request(
                    prepared.adapted, prepared.parsed, None
                )
        except Exception as error:
            return _rejection(prepared.rid, error)
        return _to_output(prepared.rid, answer)

    def _first_prompt_ids(self, adapted: Any) -> list[int]:
        """Token ids of a request's first prompt; empty where there is no text."""
        ids = adapted.input_ids
        if ids:
            return ids[0] if isinstance(ids[0], list) else ids
        text = adapted.text[0] if isinstance(adapted.text, list) else adapted.text
        tokenizer = self._tokenizer_manager.tokenizer
        if not text or tokenizer is None:
            return []
        return list(tokenizer(text)["input_ids"])


def _parse_body(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = loads_lenient(body)
    if not isinstance(value, dict):
        raise ValueError("The body of a request must be a JSON object.")
    return value


def _output_limits(adapted: Any) -> tuple[int | None, bool]:
    """How many tokens a request may generate, and whether it will not stop before."""
    if not isinstance(adapted, GenerateReqInput):
        return 1, True  # an embedding: its prompt is computed and nothing else
    params = adapted.sampling_params or {}
    if isinstance(params, list):
        params = params[0]
    most = params.get("max_new_tokens")
    return most, bool(params.get("ignore_eos")) and most is not None


def _rejection(rid: str, error: Exception) -> RequestOutput:
    """An exception of SGLang's serving code as the HTTP error it stands for."""
    if isinstance(error, ValidationError):
        message, param = describe_validation_error(error)
        return _error_output(rid, 400, message, param=param)
    if isinstance(error, HTTPException):
        return _error_output(rid, error.status_code, str(error.detail))
    if isinstance(error, (ValueError, TypeError)):
        return _error_output(rid, 400, str(error))
    logger.error("Request %s failed", rid, exc_info=error)
    return _error_output(rid, 500, f"Internal server error: {error}")


def _error_output(
    rid: str, status_code: int, message: str, *, param: str | None = None
) -> RequestOutput:
    too_long = "context length" in message
    code = "context_length_exceeded" if too_long else None
    content = error_body(message, status_code=status_code, param=param, code=code)
    return RequestOutput(status_code, rid, orjson.dumps(content))


def _to_output(rid: str, answer: Any) -> RequestOutput:
    if isinstance(answer, Response):
        # SGLang's error: flat, with the HTTP status as its code.
        content = orjson.loads(bytes(answer.body))
        flat = content.get("error", content)
        return _error_output(
            rid, answer.status_code, str(flat.get("message")), param=flat.get("param")
        )
    if isinstance(answer, BaseModel):
        usage = getattr(answer, "usage", None)
        return RequestOutput(
            200, rid, answer.model_dump_json().encode(), _openai_usage(usage)
        )
    items = answer if isinstance(answer, list) else [answer]
    usages = [_native_usage(item["meta_info"]) for item in items]
    body = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    return RequestOutput(200, rid, body, sum(usages, Usage()))


def _openai_usage(usage: Any) -> Usage:
    if usage is None:
        return Usage()
    details = usage.prompt_tokens_details
    return Usage(
        input_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        output_tokens=usage.completion_tokens or 0,
        reasoning_tokens=usage.reasoning_tokens or 0,
    )


def _native_usage(meta_info: dict[str, Any]) -> Usage:
    return Usage(
        input_tokens=meta_info.get("prompt_tokens", 0),
        cached_tokens=meta_info.get("cached_tokens", 0),
        output_tokens=meta_info.get("completion_tokens", 0),
        reasoning_tokens=meta_info.get("reasoning_tokens", 0),
    )
