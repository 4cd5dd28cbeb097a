"""Turns the results and exceptions of SGLang's serving code into answers."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import orjson
from fastapi import HTTPException, Response
from pydantic import BaseModel, ValidationError
from sglang.srt.entrypoints.openai.encoding_dsv32 import DS32EncodingError

from ...batch_api.message_batches import error_type
from ...batch_api.protocol import ENDPOINTS, error_body
from ...batch_api.stop_rules import REASON_KEY
from ...request import Cuts, RequestOutput, Usage, Work
from ..compat.server_types import EngineAnswer, JsonObject
from .checks.body_checks import MESSAGES_URL, errors_by_field
from .checks.value_checks import FieldError

logger = logging.getLogger(__name__)

_MAX_MESSAGES_ERROR_LEN = 500
# SGLang's message for a grammar after which no token may follow. SGLang reports it as
# an error of the server.
_REFUSED_BY_GRAMMAR = "Grammar accept_token failed"
# SGLang's message for a request that was aborted while its grammar was compiled. SGLang
# reports it as the request's own error.
_ABORTED_BEFORE_START = "Aborted by AbortReq"


def rejection(url: str, rid: str, error: Exception) -> RequestOutput:
    """An exception of SGLang's serving code as the corresponding HTTP error."""
    if isinstance(error, ValidationError):
        if url == MESSAGES_URL:
            return _error_output(url, rid, 400, _all_errors(error))
        message, param = errors_by_field(error)[0]
        return _error_output(url, rid, 400, message, param=param)
    if isinstance(error, FieldError):
        return _error_output(
            url, rid, 400, str(error), param=error.param, code=error.code
        )
    if isinstance(error, HTTPException):
        return _error_output(url, rid, error.status_code, str(error.detail))
    if isinstance(error, (ValueError, TypeError, DS32EncodingError, re.error)):
        return _error_output(url, rid, 400, str(error))
    logger.error("Request %s failed", rid, exc_info=error)
    return _error_output(url, rid, 500, f"Internal server error: {error}")


def abort_reason(engine_answers: Iterable[EngineAnswer]) -> str | None:
    """Why the engine aborted a sequence of these answers, or None if all have ended.

    A request that SGLang refuses is an exception, and one of ours that is cancelled has no
    answer. So this is an abort by somebody else, such as by ``/abort_request``.
    """
    for report in chain.from_iterable(map(_reports, engine_answers)):
        reason = report.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            return str(reason.get("message") or "no reason given")
    return None


def aborted(url: str, rid: str, reason: str) -> RequestOutput:
    """The error of a request that the engine aborted, which may be sent again."""
    message = f"The engine aborted this request before its end: {reason}"
    return _error_output(url, rid, 503, message, code="request_aborted")


def unusable(
    url: str,
    output: RequestOutput,
    failure: Exception | None,
    engine_answers: Sequence[EngineAnswer],
    num_prompts: Sequence[int],
) -> RequestOutput:
    """The error of a request whose answer cannot be converted: the server's, not its own.

    output: the error as it would be for a request that cannot be converted.
    failure: the exception behind it, if it was not told by SGLang.
    """
    if output.status_code != 500:
        logger.error(
            "Request %s has no usable answer", output.request_id, exc_info=failure
        )
        message = orjson.loads(output.body)["error"]["message"]
        problem = f"The answer cannot be converted: {message}"
        output = _error_output(url, output.request_id, 500, problem, is_settled=True)
    used, work = _spent(engine_answers, num_prompts)
    return replace(output, usage=used, work=work)


def output_of(
    url: str,
    rid: str,
    answer: object,
    engine_answers: Sequence[EngineAnswer],
    num_prompts: Sequence[int] = (),
) -> RequestOutput:
    """The answer of an endpoint, as HTTP would have returned it.

    answer: SGLang's response object, HTTP response or list of objects.
    engine_answers: the engine's answers behind it. Their tokens are counted if
        ``answer`` itself has no usage.
    num_prompts: for each of them, how many prompts it answers.
    """
    if isinstance(answer, Response) and answer.status_code >= 400:
        return _error_of_response(url, rid, answer)
    counted, work = _spent(engine_answers, num_prompts)
    usage: Any = getattr(answer, "usage", None)
    if hasattr(usage, "prompt_tokens"):  # that of sounds has seconds
        details = usage.prompt_tokens_details
        counted = Usage(
            input_tokens=usage.prompt_tokens,
            cached_tokens=(details.cached_tokens or 0) if details else 0,
            output_tokens=usage.completion_tokens or 0,
            reasoning_tokens=usage.reasoning_tokens or 0,
        )
    # SGLang says of vectors and scores that they have reached their limit, of no tokens.
    cut = engine_answers if url not in ENDPOINTS or ENDPOINTS[url].generates else ()
    cuts = sum(map(_cut, chain.from_iterable(map(_reports, cut))), Cuts())
    return RequestOutput(200, rid, _json(answer), counted, cuts=cuts, work=work)


def _json(answer: object) -> bytes:
    if isinstance(answer, Response):
        return bytes(answer.body)
    if isinstance(answer, BaseModel):
        return answer.model_dump_json().encode()
    return orjson.dumps(answer, default=_dump, option=orjson.OPT_SERIALIZE_NUMPY)


def _dump(value: object) -> JsonObject:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"an answer has a {type(value).__name__}, which JSON cannot encode")


def _error_of_response(url: str, rid: str, answer: Response) -> RequestOutput:
    if url == MESSAGES_URL:
        return RequestOutput(answer.status_code, rid, bytes(answer.body))
    # SGLang's error: flat but for /v1/responses, with the HTTP status as its code.
    content = orjson.loads(bytes(answer.body))
    error = content.get("error", content)
    message, param = str(error.get("message")), error.get("param")
    return _error_output(url, rid, answer.status_code, message, param=param)


def _error_output(
    url: str,
    rid: str,
    status_code: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    is_settled: bool = False,
) -> RequestOutput:
    """An error as its endpoint has it.

    is_settled: the message, which may have parts of an answer, says nothing more about
        status and code.
    """
    content: JsonObject
    if not is_settled and _REFUSED_BY_GRAMMAR in message:
        status_code = 400
        message = f"The grammar or schema allows no complete text. {message}"
    if not is_settled and _ABORTED_BEFORE_START in message:
        status_code, code = 503, "request_aborted"
    if url == MESSAGES_URL:
        # Details of server errors are hidden.
        shown = "Internal server error" if status_code >= 500 else message
        error = {"type": error_type(status_code), "message": shown}
        content = {"type": "error", "error": error}
    else:
        if status_code < 500 and code is None and "context length" in message:
            code = "context_length_exceeded"
        content = error_body(message, status_code=status_code, param=param, code=code)
    return RequestOutput(status_code, rid, orjson.dumps(content))


def _all_errors(error: ValidationError) -> str:
    """All errors in a body of the Messages API, worded as SGLang does online."""
    parts = []
    for item in error.errors(include_url=False, include_context=False):
        where = ".".join(map(str, item["loc"]))
        parts.append(f"{where}: {item['msg']}" if where else item["msg"])
    text = "; ".join(parts)
    long = len(text) > _MAX_MESSAGES_ERROR_LEN
    return f"{text[:_MAX_MESSAGES_ERROR_LEN]}\u2026" if long else text


def _cut(report: JsonObject) -> Cuts:
    """Which stop rule, if any, has ended a sequence, or its limit."""
    reason = report.get("finish_reason")
    if not isinstance(reason, dict):
        return Cuts()
    rule = reason.get(REASON_KEY)
    return (
        Cuts(**{rule: 1}) if rule else Cuts(length=int(reason.get("type") == "length"))
    )


def _spent(
    engine_answers: Iterable[EngineAnswer], num_prompts: Sequence[int]
) -> tuple[Usage, Work]:
    """Token counts of the tokenizer manager's answers, and the work for them.

    A prompt counts once, however many sequences answer it, by the first of them.
    """
    usage, work = Usage(), Work()
    for answer, prompts in zip(engine_answers, num_prompts, strict=False):
        reports = _reports(answer)
        per_prompt = max(1, len(reports) // max(1, prompts))
        for number, report in enumerate(reports):
            prompt = report.get("prompt_tokens") or 0
            cached = report.get("cached_tokens") or 0
            generated = report.get("completion_tokens") or 0
            reasoning = report.get("reasoning_tokens") or 0
            if number % per_prompt:
                usage += Usage(0, 0, generated, reasoning)
                work += Work.of_sequence(0, prompt, generated)
            else:
                usage += Usage(prompt, cached, generated, reasoning)
                work += Work.of_sequence(prompt - cached, cached, generated)
    return usage, work


def _reports(engine_answer: EngineAnswer) -> list[JsonObject]:
    if engine_answer is None:  # it failed, and the serving class answered nevertheless
        return []
    found = engine_answer if isinstance(engine_answer, list) else [engine_answer]
    return [answer["meta_info"] for answer in found]
