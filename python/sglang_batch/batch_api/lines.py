"""The shapes of a batch's lines: request in, result or error out."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from ..request import BatchRequestInput, RequestOutput, engine_request_id, json_line
from .protocol import error_body


class InvalidLine(ValueError):
    """The line is not a JSON object."""


class _Envelope(msgspec.Struct):
    # Raw keeps the body as the client wrote it, numbers beyond 64 bits included.
    custom_id: Any = msgspec.UNSET
    method: Any = msgspec.UNSET
    url: Any = msgspec.UNSET
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decoder = msgspec.json.Decoder(_Envelope)
REQUIRED_KEYS = ("custom_id", "method", "url", "body")


def decode_envelope(line: bytes) -> dict[str, Any]:
    """The known keys that an input line has, with ``body`` as raw bytes.

    Raises:
        InvalidLine: the line is not a JSON object.
    """
    try:
        envelope = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decode_lenient(line)
    found = {}
    for key in REQUIRED_KEYS:
        value = getattr(envelope, key)
        if value is not msgspec.UNSET:
            found[key] = bytes(value) if key == "body" else value
    return found


def loads_lenient(data: bytes) -> Any:
    """Parse JSON as Python writes it: NaN, Infinity and numbers of any size too.

    Raises:
        ValueError: not JSON in UTF-8, or nested too deep.
    """
    try:
        # Given bytes, json would also accept UTF-16 and lone surrogates.
        return json.loads(data.decode())
    except RecursionError:
        raise ValueError("The JSON is nested too deep.") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # a whole number that Python does not read
        most = sys.get_int_max_str_digits()
        raise ValueError(f"A number has more than {most:,} digits.") from None


def _decode_lenient(line: bytes) -> dict[str, Any]:
    try:
        value = loads_lenient(line)
        if not isinstance(value, dict):
            raise InvalidLine
        found = {key: value[key] for key in REQUIRED_KEYS if key in value}
        if "body" in found:
            found["body"] = json.dumps(found["body"]).encode()
    except (ValueError, RecursionError):
        raise InvalidLine from None
    return found


class ResultResponse(msgspec.Struct):
    """The answer to a request that ran.

    request_id: the engine's name for the request, or None if it was rejected at once.
    """

    status_code: int
    request_id: str | None
    body: msgspec.Raw


class ResultError(msgspec.Struct):
    """Why a request never ran."""

    code: str
    message: str


class ResultLine(msgspec.Struct):
    """A line of an output or error file.

    custom_id: None for a line of the input that has none, or one that cannot be used.
    response: None for a request that was cancelled, expired or never began.
    error: None for a request that was answered, also with an error.
    merged_with: the ``custom_id`` of an equal request that was computed for both. Not there
        if this one was computed.
    from_cache: true if an earlier job computed the answer. Not there otherwise.
    """

    id: str
    custom_id: str | None
    response: ResultResponse | None
    error: ResultError | None
    merged_with: str | msgspec.UnsetType = msgspec.UNSET
    from_cache: bool | msgspec.UnsetType = msgspec.UNSET

    @property
    def index(self) -> int:
        """Index of the request in its batch, from 0, as the line's id has it."""
        _, dash, number = self.id.rpartition("-")
        # Earlier releases wrote eight hexadecimal digits.
        return int(number) if dash else int(self.id[-8:], 16)


def result_line(
    request: BatchRequestInput, job_id: str, output: RequestOutput
) -> bytes:
    """One line of an output or error file, for a request that ran."""
    response = ResultResponse(
        output.status_code, output.request_id, msgspec.Raw(output.body)
    )
    merged_with = msgspec.UNSET if output.merged_with is None else output.merged_with
    return _encode(
        request.index,
        request.custom_id,
        job_id,
        response,
        None,
        merged_with,
        output.from_cache or msgspec.UNSET,
    )


def invalid_line(
    index: int, custom_id: str | None, job_id: str, code: str, message: str
) -> bytes:
    """One line of an error file, for a line of the input that is not a valid request.

    Readers of either field see the error: ``response`` is the answer that the endpoint
    would give, and ``error`` is set because nothing ran.
    """
    body = msgspec.json.encode(error_body(message, code=code))
    response = ResultResponse(400, engine_request_id(job_id, index), msgspec.Raw(body))
    return _encode(index, custom_id, job_id, response, ResultError(code, message))


def unrun_line(
    request: BatchRequestInput, job_id: str, code: str, message: str
) -> bytes:
    """One line of an error file, for a request that never ran."""
    error = ResultError(code, message)
    return _encode(request.index, request.custom_id, job_id, None, error)


def _encode(
    index: int,
    custom_id: str | None,
    job_id: str,
    response: ResultResponse | None,
    error: ResultError | None,
    merged_with: str | msgspec.UnsetType = msgspec.UNSET,
    from_cache: bool | msgspec.UnsetType = msgspec.UNSET,
) -> bytes:
    # The engine's id of the request, with OpenAI's prefix.
    line_id = f"batch_req_{engine_request_id(job_id, index).removeprefix('batch_')}"
    line = ResultLine(line_id, custom_id, response, error, merged_with, from_cache)
    return json_line(line).removesuffix(b"\n")
