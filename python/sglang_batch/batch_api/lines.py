"""The shapes of a batch's lines: request in, result or error out."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ..request import BatchRequestInput, RequestOutput


class InvalidLine(ValueError):
    """The line is not a JSON object."""


class _Envelope(msgspec.Struct):
    # Raw keeps the body as the client wrote it: numbers beyond 64 bits included.
    custom_id: Any = msgspec.UNSET
    method: Any = msgspec.UNSET
    url: Any = msgspec.UNSET
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decoder = msgspec.json.Decoder(_Envelope)
REQUIRED_KEYS = ("custom_id", "method", "url", "body")


def decode_envelope(line: bytes) -> dict[str, Any]:
    """The keys of an input line that are present; ``body`` as raw bytes.

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
        # Given bytes, json would guess at UTF-16 and let lone surrogates through.
        return json.loads(data.decode())
    except RecursionError:
        raise ValueError("the JSON is nested too deep") from None


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


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _ResultLine(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: _Error | None


def result_line(
    request: BatchRequestInput, job_id: str, output: RequestOutput
) -> bytes:
    """One line of an output or error file, for a request that ran."""
    response = _Response(
        output.status_code, output.request_id, msgspec.Raw(output.body)
    )
    return _encode(request, job_id, response, None)


def unrun_line(
    request: BatchRequestInput, job_id: str, code: str, message: str
) -> bytes:
    """One line of an error file, for a request that never ran."""
    return _encode(request, job_id, None, _Error(code, message))


def _encode(
    request: BatchRequestInput,
    job_id: str,
    response: _Response | None,
    error: _Error | None,
) -> bytes:
    line_id = f"batch_req_{job_id.removeprefix('batch_')}{request.index:08x}"
    return msgspec.json.encode(_ResultLine(line_id, request.custom_id, response, error))
