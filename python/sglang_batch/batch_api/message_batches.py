"""Anthropic's Message Batches: their requests, objects and results, over our own.

A message batch is a batch over ``/v1/messages``. Its requests become the lines of an
input file, a batch's row is shown as a ``MessageBatch``, and the lines of its output
and error files as the results of its requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, BinaryIO

import msgspec

from ..errors import ApiError
from . import protocol as api
from .jsonl import LineError

Row = dict[str, Any]

# The metadata of a message batch's row, which clients of this API cannot set, say what
# its columns do not: ``requests``, how many it has; ``sha256`` of the body they came in;
# ``rejected``, how many of them were found unusable at once; and ``rejected_file_id``,
# the file of those.

API = "anthropic"
URL = "/v1/messages"
WINDOW = "24h"
MAX_REQUESTS = 100_000
MAX_BYTES = 256 << 20

_ID_PREFIX = "msgbatch_"
_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")

ENDED_STATUSES = (api.COMPLETED, api.FAILED, api.CANCELLED, api.EXPIRED)

# Where requests stand that never ran, by the status their batch ended with.
ENDED_TYPES = {api.CANCELLED: "canceled", api.EXPIRED: "expired"}

_STATUS_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
ERROR_TYPES = {
    *_STATUS_ERROR_TYPES.values(),
    "invalid_request_error",
    "billing_error",
    "timeout_error",
    "api_error",
}


# Ids ----------------------------------------------------------------------------


def shown_id(batch_id: str) -> str:
    """What clients call the batch that we call ``batch_...``."""
    return _ID_PREFIX + batch_id.removeprefix("batch_")


def batch_id_of(message_batch_id: str) -> str:
    """Our id of what clients call ``msgbatch_...``; of any other name, no batch's."""
    if not message_batch_id.startswith(_ID_PREFIX):
        return ""
    return "batch_" + message_batch_id.removeprefix(_ID_PREFIX)


# Requests -----------------------------------------------------------------------


class MessageRequest(msgspec.Struct):
    """One request as the client wrote it; ``params`` are the body of a message."""

    custom_id: str
    params: msgspec.Raw


class _Body(msgspec.Struct):
    requests: list[MessageRequest]


_body_decoder = msgspec.json.Decoder(_Body)


def requests_of(body: Any) -> list[MessageRequest]:
    """The requests of a create call.

    Args:
        body: bytes, or something that has them, such as a mapped file; the requests
            refer to it.

    Raises:
        ApiError: they are no list of requests, or none may be a batch.
    """
    try:
        requests = _body_decoder.decode(body).requests
    except RecursionError:
        raise ApiError(400, "The body is nested too deep.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not a list of requests: {error}") from None
    if not 1 <= len(requests) <= MAX_REQUESTS:
        raise ApiError(
            400,
            f"requests: {len(requests)} requests; a batch has 1 to {MAX_REQUESTS}.",
        )
    _check_requests(requests)
    return requests


def _check_requests(requests: list[MessageRequest]) -> None:
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


def write_lines(requests: Iterable[MessageRequest], file: BinaryIO) -> None:
    """Write requests as the lines of an input file, ``params`` as they are."""
    for request in requests:
        file.write(
            b'{"custom_id":"%b","method":"POST","url":"%b","body":%b}\n'
            % (
                request.custom_id.encode(),
                URL.encode(),
                # Between the tokens of a JSON text; within a string it is escaped.
                bytes(request.params).replace(b"\n", b" "),
            )
        )


def rejections(errors: list[LineError]) -> dict[int, LineError]:
    """The first error of each request that cannot run, by its index.

    Raises:
        ApiError: for what a batch cannot hold at all.
    """
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
    """A line of an error file for a request that was found unusable at once."""
    status_code = 404 if error.code == "model_not_found" else 400
    body = error_body(error.message, status_code)
    response = {"status_code": status_code, "request_id": None, "body": body}
    return msgspec.json.encode(
        {
            "id": f"batch_req_{index:08x}",
            "custom_id": custom_id,
            "response": response,
            "error": None,
        }
    )


def rejected_file_id(row: Row) -> str | None:
    """The file of a batch's requests that were found unusable at once."""
    found: str | None = json.loads(row["metadata"]).get("rejected_file_id")
    return found


# Objects ------------------------------------------------------------------------


def error_body(
    message: str, status_code: int = 400, request_id: str | None = None
) -> dict[str, Any]:
    """The error object that Anthropic's clients understand."""
    default = "invalid_request_error" if status_code < 500 else "api_error"
    kind = _STATUS_ERROR_TYPES.get(status_code, default)
    error = {"type": kind, "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def has_ended(row: Row) -> bool:
    return row["status"] in ENDED_STATUSES


def message_batch_object(row: Row, base_url: str) -> dict[str, Any]:
    """A batch as Anthropic's API shows it.

    Args:
        base_url: of this server, where the results are read; ends with a slash.
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
    results_url = f"{base_url}v1/messages/batches/{batch_id}/results"
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
    """Requests by where they stand; all are processing until all have ended."""
    known = json.loads(row["metadata"])
    total, rejected = int(known["requests"]), int(known.get("rejected", 0))
    counts = dict.fromkeys(
        ("processing", "succeeded", "errored", "canceled", "expired"), 0
    )
    if not ended:
        return counts | {"processing": total}
    if has_results(row):
        counts["succeeded"] = row["completed"]
        counts["errored"] = row["failed"]
    counts["errored"] += rejected
    rest = ENDED_TYPES.get(row["status"], "errored")
    counts[rest] += total - sum(counts.values())
    return counts


def has_results(row: Row) -> bool:
    """Whether a batch that has ended left result files."""
    return bool(row["output_file_id"] or row["error_file_id"])
