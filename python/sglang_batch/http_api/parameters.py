"""What routes read from a request, checked; and pages of what they answer."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import JSONResponse

from ..batch_api import protocol as api
from ..errors import ApiError
from ..service import BatchService


def service_of(request: Request) -> BatchService:
    service: BatchService = request.app.state.offline_batch_service
    return service


async def json_object(request: Request) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(await request.body())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise ApiError(400, "The body must be a JSON object.")
    return body


def invalid(param: str, value: Any, hint: str) -> ApiError:
    """The error of a value out of range."""
    message = f"Invalid value for '{param}': {value!r:.100}. {hint}"
    return ApiError(400, message, param=param, code="invalid_value")


def check_string(body: dict[str, Any], key: str) -> None:
    """A required key of a body must be text."""
    if body.get(key) is None:
        raise ApiError(
            400,
            f"Missing required parameter: '{key}'.",
            param=key,
            code="missing_required_parameter",
        )
    if not isinstance(body[key], str):
        raise ApiError(
            400,
            f"Invalid type for '{key}': expected a string.",
            param=key,
            code="invalid_type",
        )


def check_choice(body: dict[str, Any], key: str, choices: tuple[str, ...]) -> None:
    if body[key] not in choices:
        raise ApiError(
            400,
            f"Invalid value: '{body[key]}'. Supported values are: "
            f"{', '.join(repr(choice) for choice in choices)}.",
            param=key,
            code="invalid_value",
        )


def check_metadata(metadata: Any) -> None:
    def bad(message: str, param: str, code: str) -> ApiError:
        return ApiError(400, message, param=param, code=code)

    if metadata is None:
        return
    if not isinstance(metadata, dict):
        raise bad("'metadata' must be an object.", "metadata", "invalid_type")
    if len(metadata) > api.MAX_METADATA_PAIRS:
        raise bad(
            f"'metadata' has {len(metadata)} pairs; at most "
            f"{api.MAX_METADATA_PAIRS} are allowed.",
            "metadata",
            "invalid_value",
        )
    for key, value in metadata.items():
        param = f"metadata.{key}"
        if not isinstance(value, str):
            kinds: dict[type, str] = {list: "an array", dict: "an object"}
            kind = kinds.get(type(value), "another type")
            raise bad(
                f"Invalid type for '{param}': expected a string, but got {kind} "
                "instead.",
                param,
                "invalid_type",
            )
        if (
            len(key) > api.MAX_METADATA_KEY_LEN
            or len(value) > api.MAX_METADATA_VALUE_LEN
        ):
            raise bad(
                f"'{param}' is too long: keys have at most "
                f"{api.MAX_METADATA_KEY_LEN} and values at most "
                f"{api.MAX_METADATA_VALUE_LEN} characters.",
                param,
                "invalid_value",
            )


def check_limit(limit: int, maximum: int) -> int:
    if not 1 <= limit <= maximum:
        raise ApiError(
            400,
            f"Invalid value for 'limit': {limit}. Expected 1 to {maximum}.",
            param="limit",
        )
    return limit


def page(objects: list[dict[str, Any]], limit: int) -> JSONResponse:
    shown = objects[:limit]
    return JSONResponse(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(objects) > limit,
        }
    )
