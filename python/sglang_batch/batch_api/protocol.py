"""The words of the OpenAI Batch API: endpoints, statuses, limits, error bodies."""

from __future__ import annotations

import re
from dataclasses import dataclass

VALIDATING = "validating"
FAILED = "failed"
IN_PROGRESS = "in_progress"
FINALIZING = "finalizing"
COMPLETED = "completed"
CANCELLING = "cancelling"
CANCELLED = "cancelled"
EXPIRED = "expired"

ACTIVE_STATUSES = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING)

FILE_PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
BATCH_OUTPUT_PURPOSE = "batch_output"

# Of one part: the windows a client may ask for are any such durations.
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW = re.compile(r"(?:\d{1,9}[smhd])+")
MAX_WINDOW_S = 366 * 86_400

MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_LEN = 64
MAX_METADATA_VALUE_LEN = 512
MAX_CUSTOM_ID_LEN = 512
MAX_FILENAME_LEN = 1024
MAX_UPLOAD_BYTES = 8 << 30
# How long a file may be asked to be kept.
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000
MAX_PRIORITY = 1000


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint a batch line may name.

    title: how error messages call it.
    required: the body's keys without which there is nothing to do.
    """

    url: str
    title: str
    required: tuple[str, ...]


ENDPOINTS = {
    endpoint.url: endpoint
    for endpoint in (
        Endpoint("/v1/chat/completions", "Chat Completions", ("messages",)),
        Endpoint("/v1/completions", "Completions", ("prompt",)),
        Endpoint("/v1/embeddings", "Embeddings", ("input",)),
        Endpoint("/v1/responses", "Responses", ("input",)),
        Endpoint("/v1/messages", "Messages", ("messages", "max_tokens")),
        Endpoint("/v1/score", "Score", ("items",)),
        Endpoint("/v1/rerank", "Rerank", ("query", "documents")),
        Endpoint("/v1/classify", "Classify", ("input",)),
    )
}


def window_seconds(window: str) -> int | None:
    """Seconds of a completion window: ``24h``, ``90m``, ``1h30m``; None if it is none.

    OpenAI has only ``24h``; ours may have any length from a second to a year.
    """
    if not _WINDOW.fullmatch(window):
        return None
    parts = re.findall(r"(\d+)([smhd])", window)
    seconds = sum(int(count) * _SECONDS[unit] for count, unit in parts)
    return seconds if 1 <= seconds <= MAX_WINDOW_S else None


def error_body(
    message: str,
    *,
    status_code: int = 400,
    param: str | None = None,
    code: str | None = None,
) -> dict[str, dict[str, str | None]]:
    """The nested error object that OpenAI's clients understand."""
    kind = "invalid_request_error" if status_code < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
