"""Reads and checks the parameters and bodies of requests, and finds the server's own URL.

Each check raises ApiError.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address, ip_network
from types import NoneType
from typing import Any, TypeVar

import msgspec
from fastapi import Query, Request
from pydantic import AfterValidator, BaseModel, ValidationError
from pydantic_core import ErrorDetails
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ...batch_api.media_places import parse_place
from ...errors import ApiError
from ...store.incoming import AHEAD_BYTES, IncomingFile, Room
from ..service import BatchService
from .authorization import caller_of

Body = TypeVar("Body", bound=BaseModel)
# A field of JSON bodies and forms that means the same as the header Idempotency-Key.
BODY_KEY = "idempotency_key"
_MAX_PARAM_LEN = 120


def service_of(request: Request) -> BatchService:
    service: BatchService = request.app.state.offline_batch_service
    return service


def invalid(param: str, value: Any, hint: str) -> ApiError:
    """The error for a value that is not allowed. ``hint`` lists the allowed ones."""
    message = f"Invalid value for '{param}': {_shown(value)}. {hint}"
    return ApiError(400, message, param=param, code="invalid_value")


def _shown(value: Any) -> str:
    return repr(value[:100]) if isinstance(value, str) else f"{value!r:.100}"


# Names of types, by pydantic's type of an error and by that of a value.
_EXPECTED = {
    "dict_type": "an object",
    "model_type": "an object",
    "string_type": "a string",
}
_GIVEN = {
    bool: "a boolean",
    dict: "an object",
    float: "a number",
    int: "an integer",
    list: "an array",
    str: "a string",
    NoneType: "null",
}


def checked(model: type[Body], body: dict[str, Any]) -> Body:
    """The fields of a JSON body, checked by the model that documents it.

    Its idempotency key is checked where it is used. Raises 400 for the first error,
    in OpenAI's words.
    """
    fields = {key: value for key, value in body.items() if key != BODY_KEY}
    try:
        return model.model_validate(fields, strict=True)
    except ValidationError as error:
        raise _refusal(model, error.errors(include_url=False)[0]) from None


def _refusal(model: type[BaseModel], error: ErrorDetails) -> ApiError:
    kind, given, place = error["type"], error["input"], error["loc"]
    # Without the index in a list, and the mark of a bad key.
    names = [each for each in place if isinstance(each, str) and each != "[key]"]
    param = ".".join(names)[:_MAX_PARAM_LEN]
    if kind == "missing" or (given is None and len(place) == 1):
        message = f"Missing required parameter: '{param}'."
        code = "missing_required_parameter"
    elif kind == "extra_forbidden":
        known = ", ".join(model.model_fields)
        message = f"Unknown parameter: '{param}'. Supported are: {known}."
        code = "unknown_parameter"
    elif kind in _EXPECTED:
        message = (
            f"Invalid type for '{param}': expected {_EXPECTED[kind]}, but got "
            f"{_GIVEN[type(given)]} instead."
        )
        code = "invalid_type"
    elif kind == "literal_error":
        known = error["ctx"]["expected"]
        message = f"Invalid value: {_shown(given)}. Supported values are: {known}."
        code = "invalid_value"
    else:
        return invalid(param, given, error["msg"].removeprefix("Value error, ") + ".")
    return ApiError(400, message, param=param, code=code)


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


def check_filename(filename: str, purpose: str) -> None:
    """Check the suffix of a file with batch input."""
    # Clients name an in-memory upload "upload", so a name without a suffix is fine.
    if purpose == "batch" and "." in filename and not filename.endswith(".jsonl"):
        raise ApiError(400, "Invalid file format for Batch API. Must be .jsonl")


def form_expires_after(fields: dict[str, str]) -> Any:
    """What a JSON body would have for a form's lifetime, None without one."""
    name = "expires_after"
    if name in fields:
        return fields[name]  # a form has its objects key by key
    given: dict[str, Any] = {
        key.removeprefix(f"{name}[").removesuffix("]"): value
        for key, value in fields.items()
        if key.startswith(f"{name}[")
    }
    seconds = given.get("seconds", "")
    if seconds.isascii() and seconds.isdecimal() and len(seconds) <= 7:
        given["seconds"] = int(seconds)
    # Optional, because there is only one anchor and forms are written by hand.
    return {"anchor": "created_at", **given} if given else None


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
    headers = request.headers
    host, scheme = headers.get("host"), str(scope.get("scheme", "http"))
    if _is_trusted(request, config.trusted_proxies):
        host = _first(headers.get("x-forwarded-host")) or host
        scheme = _first(headers.get("x-forwarded-proto")).lower() or scheme
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
_BLOCK = 1 << 20


def content_length(request: Request) -> int | None:
    """The announced size of a body, or None if it has none that makes sense."""
    text = request.headers.get("content-length") or ""
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


async def write_body(
    pieces: AsyncIterator[bytes], write: Callable[[bytes], object]
) -> None:
    """Write a body in a thread, one large block at a time."""
    waiting = bytearray()
    async for piece in pieces:
        waiting += piece
        if len(waiting) >= _BLOCK:
            await asyncio.to_thread(write, bytes(waiting))
            waiting.clear()
    await asyncio.to_thread(write, bytes(waiting))


async def whole_body(request: Request, most: int) -> bytes:
    """The body, which has at most ``most`` bytes. Raises 413 if it has more."""
    message = f"The body has more than the {most} bytes that this route takes."
    return b"".join([piece async for piece in pieces_of(request, most, message)])


async def json_object(
    request: Request, most: int = MAX_JSON_BYTES
) -> tuple[dict[str, Any], bytes]:
    """A body, a JSON object, and its bytes.

    Raises 413 if too large, 400 if it is none.
    """
    content = await whole_body(request, most)
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
    service, owner = service_of(request), caller_of(request).name
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


# Total size of all that is not the file: fields, names, headers, boundaries.
MAX_FIELD_BYTES = 256 << 10
MAX_PARTS = 100
# Fields of the forms, besides their files.
_USED_FIELDS = ("purpose", "expires_after", BODY_KEY)


@dataclass(eq=False)
class Form:
    """Parses a multipart body of ``size`` bytes: its fields, and the first file named ``key``.

    That is streamed to the store's disk, not to memory.

    ``file`` is None if it has none. ``filename`` is that which the client gave.
    """

    boundary: bytes
    key: str
    room: Room
    max_bytes: int | None
    may_be_text: bool
    size: int | None

    def __post_init__(self) -> None:
        self._fields: dict[str, bytearray] = {}
        self.file: IncomingFile | None = None
        self.filename = ""
        self._digest = hashlib.sha256()
        self.ended = False
        # Bytes of the closing boundary, with the line breaks around it.
        self._end_bytes = len(self.boundary) + len(b"\r\n----\r\n")
        self._num_bytes = 0
        self._num_parts = 0
        self._header = name, value = bytearray(), bytearray()
        self._disposition = b""
        # Destination of the current part's content. Without either, it is dropped.
        self._field: bytearray | None = None
        self._in_file = False
        self._parser = MultipartParser(
            self.boundary,
            {
                "on_header_field": lambda data, begin, end: name.extend(
                    data[begin:end]
                ),
                "on_header_value": lambda data, begin, end: value.extend(
                    data[begin:end]
                ),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_part,
                "on_part_data": self._content,
                "on_end": self._end,
            },
        )

    def write(self, data: bytes) -> None:
        """Parse the next bytes.

        Raises ApiError: 400 for a limit of the form, 413 or 507 for its file,
        or OSError if that cannot be written.
        """
        self._parser.write(data)
        self._num_bytes += len(data)
        file_bytes = 0 if self.file is None else self.file.num_bytes
        if self._num_bytes - file_bytes > MAX_FIELD_BYTES:
            message = (
                f"The form has more than {MAX_FIELD_BYTES} bytes apart from its file."
            )
            raise ApiError(400, message, code="form_too_large", retry=False)

    @property
    def fields(self) -> dict[str, str]:
        return {name: x.decode(errors="replace") for name, x in self._fields.items()}

    @property
    def sha256(self) -> str:
        """Of the file, in hexadecimal."""
        return self._digest.hexdigest()

    def _end_header(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = bytes(value)
        name.clear()
        value.clear()

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            message = f"The form has more than {MAX_PARTS} fields."
            raise ApiError(400, message, code="form_too_large", retry=False)
        _, options = parse_options_header(self._disposition)
        self._disposition = b""
        name = options.get(b"name", b"").decode(errors="replace")
        filename = options.get(b"filename")
        if filename is None and self.may_be_text and name == self.key:
            filename = b""
        self._field, self._in_file = None, False
        is_file = filename is not None and name == self.key
        is_used = name.partition("[")[0] in _USED_FIELDS  # others are ignored
        if (name in self._fields and is_used) or (is_file and self.file is not None):
            message = f"Duplicate parameter: '{name[:_MAX_PARAM_LEN]}'. Send it once."
            raise ApiError(400, message, param=name[:_MAX_PARAM_LEN], retry=False)
        if filename is None:
            self._field = self._fields[name] = bytearray()
        elif is_file:
            self.filename = filename.decode(errors="replace")
            self.file = IncomingFile(self.room)
            self._in_file = True

    def _content(self, data: bytes, start: int, end: int) -> None:
        if self._field is not None:
            self._field.extend(data[start:end])
        elif self._in_file and self.file is not None:
            file, most = self.file, self.max_bytes
            content = memoryview(data)[start:end]
            if self.size is not None and not file.num_bytes:
                # The file is the last part of the forms that clients send.
                rest = self.size - self._num_bytes - start - self._end_bytes
                file.reserve(min(rest, AHEAD_BYTES))
            if most is not None and file.num_bytes + len(content) > most:
                raise too_large(most)
            self._digest.update(content)
            file.write(content)

    def _end(self) -> None:
        self.ended = True


@asynccontextmanager
async def received_form(
    request: Request, key: str, max_bytes: int | None = None, may_be_text: bool = False
) -> AsyncIterator[Form]:
    """Receive the form of a request.

    The file of its field ``key``, which may be a text field if ``may_be_text``, has
    at most ``max_bytes``. It is deleted when the block ends, unless the block moves
    it. Raises ApiError: 400 for no complete form, 413 or 507 without room for the
    file, 429 if the client sends too many at a time, or OSError if the file cannot
    be written.
    """
    room = service_of(request).room
    size = content_length(request)
    form: Form | None = None
    try:
        async with large_body(request):
            if size is not None:
                await asyncio.to_thread(_check_size, room, size, max_bytes)
            boundary = _boundary(request, key)
            form = Form(boundary, key, room, max_bytes, may_be_text, size)
            await write_body(request.stream(), form.write)
            if not form.ended:
                raise ApiError(400, "The form ends before its last boundary.")
            if form.file is not None:
                await asyncio.to_thread(form.file.close)
        yield form
    except FormParserError as error:
        raise ApiError(400, f"The form cannot be parsed: {error}.") from None
    finally:
        if form is not None and form.file is not None:
            form.file.discard()


def _check_size(room: Room, size: int, max_bytes: int | None) -> None:
    """Refuse a body whose file must be too large, before its first byte is read."""
    least = size - MAX_FIELD_BYTES
    if max_bytes is not None and least > max_bytes:
        raise too_large(max_bytes)
    if least > 0:
        room.check(least)


def _boundary(request: Request, key: str) -> bytes:
    content_type, options = parse_options_header(request.headers.get("content-type"))
    if content_type != b"multipart/form-data":
        message = (
            f"Missing required parameter: '{key}'. Send a multipart/form-data form."
        )
        raise ApiError(400, message, param=key)
    if b"boundary" not in options:
        raise ApiError(400, "Missing boundary in the multipart form.")
    return options[b"boundary"]


def too_large(max_bytes: int) -> ApiError:
    message = f"The file is larger than the {max_bytes} bytes that this server takes."
    return ApiError(413, message, param="file", code="file_too_large", retry=False)
