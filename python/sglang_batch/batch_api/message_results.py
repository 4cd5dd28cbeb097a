"""The results of a message batch, from the lines of our result files."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ..json_lines import json_line
from .lines import ResultLine, ResultResponse, decode_envelope
from .message_batches import ENDED_TYPES, ERROR_TYPES, error_body
from .objects import Row

# Types of the results of requests that never ran, by the code of their error line.
_UNRUN_TYPES = {"batch_cancelled": "canceled", "batch_expired": "expired"}


_result_decoder = msgspec.json.Decoder(ResultLine)


def results(
    outputs: Iterable[bytes], errors: Iterable[bytes], rejected: Iterable[bytes]
) -> Iterator[bytes]:
    """The results of a batch, one line per request in the order of its input.

    Args:
        outputs, errors: lines of the result files, each in the order of the input.
        rejected: see :func:`rejected_line`. Indices of the other lines do not count
            these.
    """
    ran = heapq.merge(
        map(_result_decoder.decode, outputs),
        map(_result_decoder.decode, errors),
        key=lambda line: line.index,
    )
    return _with_rejected((_result_of(line) for line in ran), rejected)


def results_without_files(
    inputs: Iterable[bytes], rejected: Iterable[bytes], row: Row
) -> Iterator[bytes]:
    """The results of a batch that ended without result files, from its input lines."""
    result: dict[str, Any] = {"type": ENDED_TYPES.get(row["status"], "errored")}
    if result["type"] == "errored":
        result["error"] = error_body(*_failure(row))

    def lines() -> Iterator[bytes]:
        for line in inputs:
            yield _encode(decode_envelope(line)["custom_id"], result)

    return _with_rejected(lines(), rejected)


def _failure(row: Row) -> tuple[str, int]:
    """Why a batch failed as a whole: message and status."""
    listed = json.loads(row["errors"])["data"] if row["errors"] else []
    if not listed:
        return "The batch failed.", 500
    where = "" if listed[0]["line"] is None else f"Line {listed[0]['line']}: "
    status_code = 500 if listed[0]["code"] == "internal_error" else 400
    return where + listed[0]["message"], status_code


def _with_rejected(
    lines: Iterator[bytes], rejected: Iterable[bytes]
) -> Iterator[bytes]:
    """The lines in order, with the rejected ones inserted at their own indices."""
    position = 0
    for each in map(_result_decoder.decode, rejected):
        while position < each.index:
            yield next(lines)
            position += 1
        yield _result_of(each)
        position += 1
    yield from lines


def _result_of(line: ResultLine) -> bytes:
    """A result in Anthropic's format."""
    result: dict[str, Any]
    if line.response is not None:
        if line.response.status_code < 400:
            result = {"type": "succeeded", "message": line.response.body}
        else:
            result = {"type": "errored", "error": _error_of(line.response)}
    else:
        code = "" if line.error is None else line.error.code
        result = {"type": _UNRUN_TYPES.get(code, "errored")}
        if result["type"] == "errored":
            message = "" if line.error is None else line.error.message
            result["error"] = error_body(message, 500)
    return _encode(line.custom_id, result)


def _error_of(response: ResultResponse) -> dict[str, Any]:
    """The error of a request that ran, from an error body of any API."""
    body = msgspec.json.decode(response.body)
    error = body.get("error") if isinstance(body, dict) else None
    found = error if isinstance(error, dict) else {}
    message = str(found.get("message") or "The request failed.")
    shown = error_body(message, response.status_code, response.request_id)
    # Some types are SGLang's own, unknown to Anthropic's clients.
    if found.get("type") in ERROR_TYPES:
        shown["error"]["type"] = found["type"]
    return shown


def _encode(custom_id: str | None, result: dict[str, Any]) -> bytes:
    return json_line({"custom_id": custom_id, "result": result})
