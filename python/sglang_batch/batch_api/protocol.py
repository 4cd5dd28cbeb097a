"""Constants of the OpenAI Batch API: endpoints, statuses, limits, error bodies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

VALIDATING = "validating"
FAILED = "failed"
IN_PROGRESS = "in_progress"
FINALIZING = "finalizing"
COMPLETED = "completed"
CANCELLING = "cancelling"
CANCELLED = "cancelled"
EXPIRED = "expired"

ACTIVE_STATUSES = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING)
ENDED_STATUSES = (COMPLETED, FAILED, CANCELLED, EXPIRED)

FILE_PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
BATCH_OUTPUT_PURPOSE = "batch_output"

# A window is a sequence of parts such as 90m.
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW = re.compile(r"(?:[0-9]{1,9}[smhd])+")
MAX_WINDOW_S = 366 * 86_400

MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_LEN = 64
MAX_METADATA_VALUE_LEN = 512
MAX_CUSTOM_ID_LEN = 512
MAX_FILENAME_LEN = 1024
# A line is held in memory, several times over while it is parsed.
MAX_LINE_BYTES = 256 << 20
MAX_MIME_TYPE_LEN = 255  # RFC 6838: two names of 127 characters
MAX_ID_LEN = 256
MAX_UPLOAD_BYTES = 8 << 30
# Limits of the time for which a client may have a file kept.
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000
MAX_PRIORITY = 1000
# Of calls whose client waits for the answers: above any batch in no danger of expiring.
INTERACTIVE_PRIORITY = MAX_PRIORITY + 1


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint a line may name, its title in messages and the keys it requires."""

    url: str
    title: str
    required: tuple[str, ...]
    generates: bool = False


# A budget of thinking, as SGLang's own API, its OpenAI endpoints and Anthropic name it.
_BUDGETS = (
    "max_thinking_tokens",
    "custom_params.thinking_budget",
    "thinking.budget_tokens",
)

TRANSCRIPTIONS_URL = "/v1/audio/transcriptions"

ENDPOINTS = {
    endpoint.url: endpoint
    for endpoint in (
        Endpoint("/v1/chat/completions", "Chat Completions", ("messages",), True),
        Endpoint("/v1/completions", "Completions", ("prompt",), True),
        Endpoint("/v1/embeddings", "Embeddings", ("input",)),
        Endpoint("/v1/responses", "Responses", ("input",), True),
        Endpoint("/v1/messages", "Messages", ("messages", "max_tokens"), True),
        Endpoint("/v1/score", "Score", ("items",)),
        Endpoint("/v1/rerank", "Rerank", ("query", "documents")),
        Endpoint("/v1/classify", "Classify", ("input",)),
        Endpoint(TRANSCRIPTIONS_URL, "Transcriptions", ("file_url",), True),
    )
}
GENERATING_URLS = frozenset(each.url for each in ENDPOINTS.values() if each.generates)

# vLLM's other names of these endpoints.
_ALIASES = {
    "/score": "/v1/score",
    "/rerank": "/v1/rerank",
    "/v2/rerank": "/v1/rerank",
}


def wrong_budget(url: str, body: dict[str, Any]) -> tuple[str, str] | None:
    """The name of a budget of thinking that ``url`` would ignore, and what is wrong."""
    own = _BUDGETS[2 if url == "/v1/messages" else 1]
    for name in _BUDGETS:
        outer, _, inner = name.partition(".")
        value = body.get(outer)
        if inner:
            value = value.get(inner) if isinstance(value, dict) else None
        if value is not None and name != own:
            return name, f"there is no such field. Did you mean {own!r}?"
    return None


def canonical_url(url: str) -> str:
    """The endpoint that a line's ``url`` names, which may be by another name."""
    return _ALIASES.get(url, url)


def window_seconds(window: str) -> int | None:
    """Seconds of a window such as ``24h`` or ``1h30m``, up to a year, or None."""
    if not _WINDOW.fullmatch(window):
        return None
    parts = re.findall(r"([0-9]+)([smhd])", window)
    seconds = sum(int(count) * _SECONDS[unit] for count, unit in parts)
    return seconds if 1 <= seconds <= MAX_WINDOW_S else None


def error_body(
    message: str,
    *,
    status_code: int = 400,
    param: str | None = None,
    code: str | None = None,
    kind: str | None = None,
) -> dict[str, dict[str, str | None]]:
    """The error object of OpenAI's clients. Its type follows from the status."""
    if kind is None:
        kind = "invalid_request_error" if status_code < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
