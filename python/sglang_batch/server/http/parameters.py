"""Reads and checks the parameters and bodies of requests, and finds the server's own URL.

Each check raises ApiError.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from ipaddress import ip_address, ip_network
from typing import Any

import msgspec
from fastapi import Query, Request
from pydantic import AfterValidator

from ...batch_api import protocol as api
from ...batch_api.media_places import parse_place
from ...config import DEDUPES
from ...errors import ApiError
from ..service import BatchService
from .authorization import owner_of
from .calls import header_of


def service_of(request: Request) -> BatchService:
    service: BatchService = request.app.state.offline_batch_service
    return service


def bad_value(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


def invalid(param: str, value: Any, hint: str) -> ApiError:
    """The error for a value that is not allowed. ``hint`` lists the allowed ones."""
    return bad_value(param, f"Invalid value for '{param}': {value!r:.100}. {hint}")


def _invalid_type(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_type")


def whole_number(
    param: str,
    least: int,
    most: int,
    hint: str | None = None,
    code: str | None = "invalid_value",
) -> tuple[Any, Any]:
    """The annotations of an integer query parameter, which document and check its range."""

    def check(value: int) -> int:
        if not least <= value <= most:
            error = invalid(param, value, hint or f"Expected {least} to {most}.")
            error.code = code
            raise error
        return value

    documented = Query(json_schema_extra={"minimum": least, "maximum": most})
    return AfterValidator(check), documented


# The number of objects on a page.
page_limit = partial(whole_number, "limit", 1, code=None)


def check_string(body: dict[str, Any], key: str) -> None:
    if body.get(key) is None:
        message = f"Missing required parameter: '{key}'."
        raise ApiError(400, message, param=key, code="missing_required_parameter")
    if not isinstance(body[key], str):
        raise _invalid_type(key, f"Invalid type for '{key}': expected a string.")


def check_length(body: dict[str, Any], key: str, most: int) -> None:
    """Check that a string of a body has at most ``most`` characters."""
    if (length := len(body[key])) > most:
        message = f"'{key}' has {length} characters; at most {most} are allowed."
        raise bad_value(key, message)


def check_choice(body: dict[str, Any], key: str, choices: Sequence[str]) -> None:
    """Check that a string of a body is one of ``choices``."""
    if body[key] not in choices:
        listed = ", ".join(map(repr, choices))
        message = f"Invalid value: '{body[key]:.100}'. Supported values are: {listed}."
        raise bad_value(key, message)


def check_whole_number(param: str, value: Any, least: int, most: int) -> int:
    """Check that a JSON value is an integer from ``least`` to ``most``."""
    if type(value) is not int or not least <= value <= most:
        raise invalid(param, value, f"Expected a whole number from {least} to {most}.")
    return value


def check_purpose(purpose: Any) -> str:
    if purpose not in api.FILE_PURPOSES:
        hint = f"Supported values are: {', '.join(api.FILE_PURPOSES)}."
        raise invalid("purpose", purpose, hint)
    return str(purpose)


def check_filename(filename: str, purpose: str) -> None:
    """Check a file's name: its length and, for batch input, its suffix."""
    if len(filename) > api.MAX_FILENAME_LEN:
        most = api.MAX_FILENAME_LEN
        raise bad_value("filename", f"A filename has at most {most} characters.")
    # Clients name an in-memory upload "upload", so a name without a suffix is fine.
    if purpose == "batch" and "." in filename and not filename.endswith(".jsonl"):
        raise ApiError(400, "Invalid file format for Batch API. Must be .jsonl")


def check_expires_after(value: Any, name: str = "expires_after") -> int | None:
    """The lifetime in seconds of ``{"anchor": "created_at", "seconds": ...}``, if any."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _invalid_type(name, f"'{name}' must be an object.")
    if value.get("anchor") != "created_at":
        raise invalid(f"{name}.anchor", value.get("anchor"), "Use 'created_at'.")
    least, most = api.MIN_EXPIRY_S, api.MAX_EXPIRY_S
    return check_whole_number(f"{name}.seconds", value.get("seconds"), least, most)


def form_expires_after(fields: dict[str, str]) -> int | None:
    """The lifetime in seconds that a form sets, or None if it sets none."""
    anchor = fields.get("expires_after[anchor]")
    seconds: Any = fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if str(seconds).isascii() and str(seconds).isdecimal() and len(seconds) <= 7:
        seconds = int(seconds)
    # Optional, because there is only one anchor and forms are written by hand.
    return check_expires_after({"anchor": anchor or "created_at", "seconds": seconds})


def check_completion_window(window: str) -> None:
    """Check that a completion window is a duration such as ``24h``."""
    if api.window_seconds(window) is None:
        raise bad_value(
            "completion_window",
            f"Invalid value for 'completion_window': '{window:.100}'. "
            "Use '24h' or another duration such as '30m', '6h' or '7d'.",
        )


def check_priority(priority: Any) -> int:
    """Check the priority of a batch or a wave. None is 0."""
    most = api.MAX_PRIORITY
    value = 0 if priority is None else priority
    return check_whole_number("priority", value, -most, most)


def check_enough(share: Any) -> float | None:
    """Check the share of answers after which a batch ends. None is all of them."""
    if share is None:
        return None
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if not number or not 0 < share <= 1:
        raise invalid("enough", share, "Use a share above 0 and at most 1.")
    return float(share)


def check_dedupe(value: Any) -> str | None:
    """Check whether equal lines of a batch are computed once. None: as the server does."""
    if value is not None and value not in DEDUPES:
        raise invalid("dedupe", value, f"Use one of {', '.join(DEDUPES)}.")
    return None if value is None else str(value)


def check_metadata(metadata: Any) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        raise _invalid_type("metadata", "'metadata' must be an object.")
    if len(metadata) > api.MAX_METADATA_PAIRS:
        raise bad_value(
            "metadata",
            f"'metadata' has {len(metadata)} pairs; at most "
            f"{api.MAX_METADATA_PAIRS} are allowed.",
        )
    for key, value in metadata.items():
        _check_metadata_pair(key, value)


def _check_metadata_pair(key: str, value: Any) -> None:
    param = f"metadata.{key:.100}"
    if not isinstance(value, str):
        kinds: dict[type, str] = {list: "an array", dict: "an object"}
        kind = kinds.get(type(value), "another type")
        raise _invalid_type(
            param,
            f"Invalid type for '{param}': expected a string, but got {kind} instead.",
        )
    if len(key) > api.MAX_METADATA_KEY_LEN or len(value) > api.MAX_METADATA_VALUE_LEN:
        raise bad_value(
            param,
            f"'{param}' is too long: keys have at most {api.MAX_METADATA_KEY_LEN} and "
            f"values at most {api.MAX_METADATA_VALUE_LEN} characters.",
        )


# A name, an IPv4 or an IPv6 address, and a port.
_HOST = re.compile(
    r"(?=.{1,255}$)([A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?\.?|\[[0-9A-Fa-f:.]{2,45}\])"
    r"(:[0-9]{1,5})?"
)


def base_url(request: Request) -> str:
    """How the links of an answer begin, without a slash at the end.

    ``public_url``, or else the host that this call itself named: its answer goes to nobody
    else. Forwarded headers count only from ``trusted_proxies``. Empty if the call names no
    valid host, which makes the links paths.
    """
    config = service_of(request).config
    if config.public_url:
        return config.public_url.rstrip("/")
    scope = request.scope
    host, scheme = header_of(scope, b"host"), str(scope.get("scheme", "http"))
    if _is_trusted(request, config.trusted_proxies):
        host = _first(header_of(scope, b"x-forwarded-host")) or host
        scheme = _first(header_of(scope, b"x-forwarded-proto")).lower() or scheme
    if scheme not in ("http", "https") or not _is_host(host):
        return ""
    return f"{scheme}://{host}{scope.get('root_path', '').rstrip('/')}"


def _is_trusted(request: Request, proxies: tuple[str, ...]) -> bool:
    try:
        address = ip_address(request.client.host) if request.client else None
    except ValueError:  # a socket of this machine
        return False
    return any(address in ip_network(each) for each in proxies if address)


def _first(value: str | None) -> str:
    """The first of the values of a header: that of the proxy nearest to the client."""
    return (value or "").partition(",")[0].strip()


def _is_host(host: str | None) -> bool:
    """Whether clients can call it: they refuse odd addresses and ports."""
    if host is None or _HOST.fullmatch(host) is None:
        return False
    with suppress(ValueError):
        return bool(parse_place(f"http://{host}"))
    return False


# For bodies without lines or contents of files.
MAX_JSON_BYTES = 1 << 20
_MAX_DIGITS = 18
# How long a body waits for others of its client to end, and how many may wait.
PATIENCE_S = 10.0
MAX_WAITING = 4096


def content_length(request: Request) -> int | None:
    """The announced size of a body, or None if it has none that makes sense."""
    text = header_of(request.scope, b"content-length") or ""
    if not text.isascii() or not text.isdecimal() or len(text) > _MAX_DIGITS:
        return None
    return int(text)


async def pieces_of(request: Request, most: int, message: str) -> AsyncIterator[bytes]:
    """The body piece by piece.

    Raises:
        ApiError: 413 with this message, the body has more than ``most`` bytes. Before
            the first of them if it announces that.
    """
    size = content_length(request) or 0
    if size <= most:
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size > most:
                break
            yield piece
    if size > most:
        raise ApiError(413, message, code="body_too_large", retry=False)


async def json_object(
    request: Request, most: int = MAX_JSON_BYTES
) -> tuple[dict[str, Any], bytes]:
    """A body, a JSON object, and its bytes.

    Raises 413 if too large, 400 if it is none.
    """
    message = f"The body has more than the {most} bytes that this route takes."
    content = b"".join([piece async for piece in pieces_of(request, most, message)])
    try:
        body = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise ApiError(400, "The body must be a JSON object.")
    return body, content


@asynccontextmanager
async def large_body(request: Request) -> AsyncGenerator[None]:
    """Receive a body that may be large in this block.

    A client that sends as many as it may waits for one of them to end. Raises 429
    if none has for ``PATIENCE_S`` seconds, or too many wait.
    """
    service, owner = service_of(request), owner_of(request)
    most = service.config.max_uploads
    # Well before the body times out.
    patience_s = min(PATIENCE_S, service.config.upload_timeout_s / 2)
    turns = service.turns.setdefault(owner, asyncio.Semaphore(most))
    service.num_receiving[owner] += 1
    try:
        try:
            late = service.num_receiving[owner] > most + MAX_WAITING
            async with asyncio.timeout(0 if late else patience_s):
                await turns.acquire()
        except TimeoutError:
            message = (
                f"{most} bodies are being received from this client (max_uploads); wait "
                "for one of them to end."
            )
            raise ApiError(429, message, code="too_many_uploads") from None
        try:
            yield
        finally:
            turns.release()
    finally:
        service.num_receiving[owner] -= 1
        if not service.num_receiving[owner]:
            del service.num_receiving[owner], service.turns[owner]
