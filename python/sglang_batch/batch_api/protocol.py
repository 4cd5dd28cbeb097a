"""The words of the OpenAI Batch API: endpoints, statuses, limits, error bodies."""

from __future__ import annotations

from dataclasses import dataclass

VALIDATING = "validating"
FAILED = "failed"
IN_PROGRESS = "in_progress"
FINALIZING = "finalizing"
COMPLETED = "completed"
CANCELLING = "cancelling"
CANCELLED = "cancelled"

ACTIVE_STATUSES = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING)

FILE_PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
BATCH_OUTPUT_PURPOSE = "batch_output"

COMPLETION_WINDOW_S = {"24h": 24 * 3600}

MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_LEN = 64
MAX_METADATA_VALUE_LEN = 512
MAX_CUSTOM_ID_LEN = 512


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint a batch line may name.

    title: how error messages call it.
    required: the body's key without which there is nothing to do.
    """

    url: str
    title: str
    required: str


ENDPOINTS = {
    endpoint.url: endpoint
    for endpoint in (
        Endpoint("/v1/chat/completions", "Chat Completions", "messages"),
        Endpoint("/v1/completions", "Completions", "prompt"),
        Endpoint("/v1/embeddings", "Embeddings", "input"),
    )
}


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
