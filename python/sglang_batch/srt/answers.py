"""What SGLang's serving code returns or raises, as the answer to a request."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

import orjson
from fastapi import HTTPException, Response
from pydantic import BaseModel, ValidationError
from sglang.srt.entrypoints.openai.encoding_dsv32 import DS32EncodingError

from ..batch_api.protocol import error_body
from ..request import RequestOutput, Usage
from .endpoints import MESSAGES_URL, describe_validation_error

logger = logging.getLogger(__name__)

# Errors of the Messages API have a vocabulary of their own.
_MESSAGES_ERROR_TYPES = {
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_MAX_MESSAGES_ERROR_LEN = 500
# What SGLang says of a grammar after which no token may follow, as its own fault.
_REFUSED_BY_GRAMMAR = "Grammar accept_token failed"


def rejection(url: str, rid: str, error: Exception) -> RequestOutput:
    """An exception of SGLang's serving code as the HTTP error it stands for."""
    if isinstance(error, ValidationError):
        if url == MESSAGES_URL:
            return _error_output(url, rid, 400, _all_errors(error))
        message, param = describe_validation_error(error)
        return _error_output(url, rid, 400, message, param=param)
    if isinstance(error, HTTPException):
        return _error_output(url, rid, error.status_code, str(error.detail))
    if isinstance(error, (ValueError, TypeError, DS32EncodingError, re.error)):
        return _error_output(url, rid, 400, str(error))
    logger.error("Request %s failed", rid, exc_info=error)
    return _error_output(url, rid, 500, f"Internal server error: {error}")


def output_of(
    url: str, rid: str, answer: Any, engine_answers: Iterable[Any]
) -> RequestOutput:
    """What an endpoint answered, as HTTP would have returned it.

    Args:
        answer: SGLang's response object, HTTP response or list of objects.
        engine_answers: what the engine gave for it; counted where the answer itself
            does not say how many tokens it took.
    """
    usage = getattr(answer, "usage", None)
    if isinstance(answer, Response) and answer.status_code >= 400:
        return _error_of_response(url, rid, answer)
    counted = (
        sum((_native_usage(item) for item in engine_answers), Usage())
        if usage is None
        else _openai_usage(usage)
    )
    return RequestOutput(200, rid, _json(answer), counted)


def _json(answer: Any) -> bytes:
    if isinstance(answer, Response):
        return bytes(answer.body)
    if isinstance(answer, BaseModel):
        return answer.model_dump_json().encode()
    return orjson.dumps(answer, default=_dump, option=orjson.OPT_SERIALIZE_NUMPY)


def _dump(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"an answer holds a {type(value).__name__}, which JSON cannot say")


def _error_of_response(url: str, rid: str, answer: Response) -> RequestOutput:
    if url == MESSAGES_URL:
        return RequestOutput(answer.status_code, rid, bytes(answer.body))
    # SGLang's error: flat but for /v1/responses, with the HTTP status as its code.
    content = orjson.loads(bytes(answer.body))
    error = content.get("error", content)
    message, param = str(error.get("message")), error.get("param")
    return _error_output(url, rid, answer.status_code, message, param=param)


def _error_output(
    url: str, rid: str, status_code: int, message: str, *, param: str | None = None
) -> RequestOutput:
    content: dict[str, Any]
    if _REFUSED_BY_GRAMMAR in message:
        status_code = 400
        message = f"The grammar or schema allows no text that is complete. {message}"
    if url == MESSAGES_URL:
        content = _messages_error(status_code, message)
    else:
        too_long = "context length" in message
        code = "context_length_exceeded" if too_long else None
        content = error_body(message, status_code=status_code, param=param, code=code)
    return RequestOutput(status_code, rid, orjson.dumps(content))


def _messages_error(status_code: int, message: str) -> dict[str, Any]:
    """The error object of the Messages API, which says nothing of a server's faults."""
    fault = status_code >= 500
    default = "api_error" if fault else "invalid_request_error"
    kind = _MESSAGES_ERROR_TYPES.get(status_code, default)
    return {
        "type": "error",
        "error": {
            "type": kind,
            "message": "Internal server error" if fault else message,
        },
    }


def _all_errors(error: ValidationError) -> str:
    """All that is wrong with a body of the Messages API, as SGLang says it online."""
    found = error.errors(include_url=False, include_context=False)
    parts = [
        f"{where}: {item['msg']}"
        if (where := ".".join(map(str, item["loc"])))
        else item["msg"]
        for item in found
    ]
    text = "; ".join(parts)
    long = len(text) > _MAX_MESSAGES_ERROR_LEN
    return f"{text[:_MAX_MESSAGES_ERROR_LEN]}\u2026" if long else text


def _openai_usage(usage: Any) -> Usage:
    details = usage.prompt_tokens_details
    return Usage(
        input_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        output_tokens=usage.completion_tokens or 0,
        reasoning_tokens=usage.reasoning_tokens or 0,
    )


def _native_usage(engine_answer: Any) -> Usage:
    """Token counts of what the tokenizer manager answers: one sequence or several."""
    if engine_answer is None:  # it failed, and the serving class answered all the same
        return Usage()
    if isinstance(engine_answer, list):
        return sum((_native_usage(item) for item in engine_answer), Usage())
    meta_info = engine_answer["meta_info"]
    return Usage(
        input_tokens=meta_info.get("prompt_tokens", 0),
        cached_tokens=meta_info.get("cached_tokens", 0),
        output_tokens=meta_info.get("completion_tokens", 0),
        reasoning_tokens=meta_info.get("reasoning_tokens", 0),
    )
