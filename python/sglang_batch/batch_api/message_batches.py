"""Anthropic's Message Batches: requests and objects, translated to and from batches.

A message batch is a batch over ``/v1/messages``. Its requests become the lines of an
input file, its row is shown as a ``MessageBatch``, and the lines of its output and
error files as the results of its requests.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from ..errors import ApiError
from ..request import as_one_line, json_line
from . import protocol as api
from .lines import LineError, ResultLine, decode_envelope
from .objects import Row, result_files

# Clients of this API cannot set the metadata of a batch, so its row keeps values there
# that have no column: ``requests``, their number, ``sha256`` of the body they came in,
# ``rejected``, the number rejected at once, and ``rejected_file_id``, their file.

API = "anthropic"
URL = "/v1/messages"
WINDOW = "24h"
MAX_REQUESTS = 100_000
MAX_BYTES = 256 << 20

_ID_PREFIX = "msgbatch_"
_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")

# Result types of requests that never ran, by the final status of their batch.
ENDED_TYPES = {api.CANCELLED: "canceled", api.EXPIRED: "expired"}

_STATUS_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
ERROR_TYPES = {
    *_STATUS_ERROR_TYPES.values(),
    "invalid_request_error",
    "billing_error",
    "api_error",
}


def shown_id(batch_id: str) -> str:
    return _ID_PREFIX + batch_id.removeprefix("batch_")


def batch_id_of(message_batch_id: str) -> str:
    """Our id for a client's ``msgbatch_...``, or empty for any other name."""
    if not message_batch_id.startswith(_ID_PREFIX):
        return ""
    return "batch_" + message_batch_id.removeprefix(_ID_PREFIX)


class MessageBatchRequest(msgspec.Struct):
    """One request as the client wrote it. ``params`` is the body of a message."""

    custom_id: str
    params: msgspec.Raw


class _CreateBody(msgspec.Struct):
    requests: list[MessageBatchRequest]


_body_decoder = msgspec.json.Decoder(_CreateBody)


def requests_of(body: Any) -> list[MessageBatchRequest]:
    """The requests in a buffer, to which they refer. Raises ApiError for no batch."""
    try:
        requests = _body_decoder.decode(body).requests
    except RecursionError:
        raise ApiError(400, "The body is nested too deep.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not a list of requests: {error}") from None
    if not 1 <= len(requests) <= MAX_REQUESTS:
        raise ApiError(
            400, f"requests: {len(requests)} requests; a batch has 1 to {MAX_REQUESTS}."
        )
    seen: dict[str, int] = {}
    for index, request in enumerate(requests):
        where, custom_id = f"requests.{index}", request.custom_id
        if _CUSTOM_ID.fullmatch(custom_id) is None:
            raise ApiError(
                400,
                f"{where}.custom_id: {custom_id[:80]!a} is not 1 to 64 letters, "
                "digits, hyphens and underscores.",
            )
        if (earlier := seen.setdefault(custom_id, index)) != index:
            raise ApiError(
                400,
                f"{where}.custom_id: {custom_id!r} is the custom_id of "
                f"requests.{earlier} too; they must be unique in a batch.",
            )
        if not bytes(request.params).startswith(b"{"):
            raise ApiError(400, f"{where}.params: must be a JSON object.")
    return requests


def input_lines(requests: Iterable[MessageBatchRequest]) -> Iterator[bytes]:
    """Requests as the lines of an input file, with ``params`` unchanged."""
    for request in requests:
        yield b'{"custom_id":"%b","method":"POST","url":"%b","body":%b}\n' % (
            request.custom_id.encode(),
            URL.encode(),
            # Within a JSON string a newline is always escaped.
            as_one_line(bytes(request.params).replace(b"\n", b" ")),
        )


def rejections(errors: list[LineError]) -> dict[int, LineError]:
    """The first error of each request, by index. ApiError: it cannot be in results."""
    found: dict[int, LineError] = {}
    for error in errors:
        assert error.line is not None, error
        index = error.line - 1
        if error.code in ("streaming_unsupported", "invalid_json_line"):
            param = (error.param or "body").replace("body", "params", 1)
            raise ApiError(400, f"requests.{index}.{param}: {error.message}")
        found.setdefault(index, error)
    return found


def rejected_line(custom_id: str, index: int, error: LineError) -> bytes:
    status_code = 404 if error.code == "model_not_found" else 400
    body = error_body(error.message, status_code)
    response = {"status_code": status_code, "request_id": None, "body": body}
    return json_line(
        {
            "id": f"batch_req_rejected-{index:08d}",
            "custom_id": custom_id,
            "response": response,
            "error": None,
        }
    )


def rejected_file_id(row: Row) -> str | None:
    found: str | None = json.loads(row["metadata"]).get("rejected_file_id")
    return found


def error_body(
    message: str, status_code: int = 400, request_id: str | None = None
) -> dict[str, Any]:
    error = {"type": error_type(status_code), "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def error_type(status_code: int) -> str:
    """Anthropic's type of an error with this status."""
    default = "invalid_request_error" if status_code < 500 else "api_error"
    return _STATUS_ERROR_TYPES.get(status_code, default)


def has_ended(row: Row) -> bool:
    return row["status"] in api.ENDED_STATUSES


def message_batch_object(row: Row, public_url: str) -> dict[str, Any]:
    """A batch as Anthropic's API shows it.

    Without ``public_url`` the URL of the results is a path, which clients resolve
    against the URL they call.
    """
    ended = has_ended(row)
    ended_at = next(
        (
            row[stamp]
            for stamp in ("completed_at", "failed_at", "cancelled_at", "expired_at")
            if row.get(stamp) is not None
        ),
        None,
    )
    status = "canceling" if row["status"] == api.CANCELLING else "in_progress"
    batch_id = shown_id(row["id"])
    results_url = f"{public_url.rstrip('/')}/v1/messages/batches/{batch_id}/results"
    return {
        "id": batch_id,
        "type": "message_batch",
        "processing_status": "ended" if ended else status,
        "request_counts": _request_counts(row, ended),
        "created_at": _rfc3339(row["created_at"]),
        "expires_at": _rfc3339(row["expires_at"]),
        "ended_at": _rfc3339(ended_at) if ended else None,
        "cancel_initiated_at": _rfc3339(row["cancelling_at"]),
        "archived_at": None,
        "results_url": results_url if ended else None,
    }


def _rfc3339(seconds: int | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _request_counts(row: Row, ended: bool) -> dict[str, int]:
    """Number of requests by state. All are processing until the batch ends."""
    known = json.loads(row["metadata"])
    total, rejected = int(known["requests"]), int(known.get("rejected", 0))
    counts = dict.fromkeys(
        ("processing", "succeeded", "errored", "canceled", "expired"), 0
    )
    if not ended:
        return counts | {"processing": total}
    if result_files(row):
        counts["succeeded"] = row["completed"]
        counts["errored"] = row["failed"]
    counts["errored"] += rejected
    rest = ENDED_TYPES.get(row["status"], "errored")
    counts[rest] += total - sum(counts.values())
    return counts


# Types of the results of requests that never ran, by the code of their error line.
_UNRUN_TYPES = {"batch_cancelled": "canceled", "batch_expired": "expired"}


_result_decoder = msgspec.json.Decoder(ResultLine)


def results(
    outputs: Iterable[bytes], errors: Iterable[bytes], rejected: Iterable[bytes]
) -> Iterator[bytes]:
    """The results of a batch, one line per request in the order of its input.

    The result files are in this order, too, and rejected ones are not counted in
    their indices.
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
    result: dict[str, Any]
    if (response := line.response) is not None and response.status_code < 400:
        result = {"type": "succeeded", "message": response.body}
    elif response is not None:  # with an error body of any API
        body = msgspec.json.decode(response.body)
        error = body.get("error") if isinstance(body, dict) else None
        found = error if isinstance(error, dict) else {}
        message = str(found.get("message") or "The request failed.")
        shown = error_body(message, response.status_code, response.request_id)
        # Some types are SGLang's own, unknown to Anthropic's clients.
        if found.get("type") in ERROR_TYPES:
            shown["error"]["type"] = found["type"]
        result = {"type": "errored", "error": shown}
    else:
        code = "" if line.error is None else line.error.code
        result = {"type": _UNRUN_TYPES.get(code, "errored")}
        if result["type"] == "errored":
            message = "" if line.error is None else line.error.message
            result["error"] = error_body(message, 500)
    return _encode(line.custom_id, result)


def _encode(custom_id: str | None, result: dict[str, Any]) -> bytes:
    return json_line({"custom_id": custom_id, "result": result})
