"""Which model or LoRA adapters a request runs, and whether its key allows them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

# The endpoints on which SGLang runs the adapter of a body. On all others it ignores the
# adapter and runs the served model.
WITH_ADAPTERS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
    }
)

Refusal = tuple[str, str]
"""Why a request is refused, and the parameter that is the reason."""


def model_refusal(
    allowed: Sequence[str], served: Sequence[str], url: str, body: object
) -> Refusal | None:
    """Why a client may not send a body.

    Like SGLang, it takes the adapter of ``base:adapter`` before that of ``lora_path``,
    and otherwise the served model.

    Args:
        allowed: names of models and adapters, the latter as ``adapter`` or
            ``base:adapter``.
        served: the names of the served model.
        url: the endpoint.
        body: the body of a request as JSON.

    Returns:
        None if the body is allowed.
    """
    fields = body if isinstance(body, dict) else {}
    model = fields.get("model")
    if not isinstance(model, str):
        return _message("must name its model", allowed), "model"
    if url in WITH_ADAPTERS:
        adapter = _adapter(model, served)
        if adapter is not None:
            return _adapter_refusal(allowed, served, adapter, "model")
        if fields.get("lora_path"):
            return native_refusal(allowed, served, fields)
    if model not in (*allowed, *served) and _adapter(model, served) not in allowed:
        return _message(f"may not use the model {model!r:.200}", allowed), "model"
    return _base_refusal(allowed, served, "model")


def native_refusal(
    allowed: Sequence[str], served: Sequence[str], fields: dict[str, Any]
) -> Refusal | None:
    """Like :func:`model_refusal` for a native request, which names adapters only."""
    paths = fields.get("lora_path")
    for adapter in (paths or [None]) if isinstance(paths, list) else [paths]:
        why = (
            _adapter_refusal(allowed, served, adapter, "lora_path")
            if adapter
            else _base_refusal(allowed, served, "lora_path")
        )
        if why is not None:
            return why
    return None


def body_refusal(
    allowed: Sequence[str], served: Sequence[str], url: str, body: bytes
) -> Refusal | None:
    """Like :func:`model_refusal`, for a body that is not parsed yet."""
    try:
        # As SGLang's routes parse it: of two equal keys, the last one counts.
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return "The body of the call cannot be read to check its model.", "model"
    return model_refusal(allowed, served, url, fields)


def _adapter_refusal(
    allowed: Sequence[str], served: Sequence[str], adapter: object, param: str
) -> Refusal | None:
    # Not in a set: the adapter is any JSON value.
    names = [_adapter(name, served) or name for name in allowed if name not in served]
    if adapter in names:
        return None
    return _message(f"may not use the adapter {adapter!r:.200}", allowed), param


def _base_refusal(
    allowed: Sequence[str], served: Sequence[str], param: str
) -> Refusal | None:
    if any(name in allowed for name in served):
        return None
    problem = "may not use the model without an adapter"
    if served:
        problem = (
            f"may not use the model {served[0]!r} without an adapter; name one as "
            f"'{served[0]}:ADAPTER' where the endpoint takes adapters"
        )
    return _message(problem, allowed), param


def _adapter(model: str, served: Sequence[str]) -> str | None:
    """The adapter in ``base:adapter``, as SGLang splits it."""
    if model in served:  # it may have colons, as in s3://bucket/model
        return None
    for name in served:
        if model.startswith(f"{name}:"):
            return model[len(name) + 1 :].strip() or None
    return model.partition(":")[2].strip() or None


def _message(problem: str, allowed: Sequence[str]) -> str:
    return f"This API key {problem}; its models are: {', '.join(allowed)}."
