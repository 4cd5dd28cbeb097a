"""Multipart forms. The file in a form is streamed to the store's disk, not to memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ...errors import ApiError
from ...store.incoming import AHEAD_BYTES, IncomingFile, Room
from .parameters import content_length, large_body, service_of, write_body

# Total size of all that is not the file: fields, names, headers, boundaries.
MAX_FIELD_BYTES = 256 << 10
MAX_PARTS = 100


@dataclass(eq=False)
class Form:
    """Parses a body of ``size`` bytes: its fields, and the first file named ``key``.

    ``file`` is None if it has none. ``filename`` is that which the client gave.
    """

    boundary: bytes
    key: str
    room: Room
    max_bytes: int | None
    may_be_text: bool
    size: int | None

    def __post_init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.file: IncomingFile | None = None
        self.filename = ""
        self._digest = hashlib.sha256()
        self.ended = False
        # Bytes of the closing boundary, with the line breaks around it.
        self._end_bytes = len(self.boundary) + len(b"\r\n----\r\n")
        self._num_bytes = 0
        self._num_parts = 0
        self._header = bytearray(), bytearray()
        self._disposition = b""
        # Destination of the current part's content. Without either, it is dropped.
        self._field: tuple[str, bytearray] | None = None
        self._in_file = False
        self._parser = MultipartParser(
            self.boundary,
            {
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_part,
                "on_part_data": self._content,
                "on_part_end": self._end_part,
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
    def sha256(self) -> str:
        """Of the file, in hexadecimal."""
        return self._digest.hexdigest()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])

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
        if filename is None:
            self._field = name, bytearray()
        elif name == self.key and self.file is None:
            self.filename = filename.decode(errors="replace")
            self.file = IncomingFile(self.room)
            self._in_file = True

    def _content(self, data: bytes, start: int, end: int) -> None:
        if self._field is not None:
            self._field[1].extend(data[start:end])
        elif self._in_file and self.file is not None:
            file, most, content = (
                self.file,
                self.max_bytes,
                memoryview(data)[start:end],
            )
            if self.size is not None and not file.num_bytes:
                # The file is the last part of the forms that clients send.
                rest = self.size - self._num_bytes - start - self._end_bytes
                file.reserve(min(rest, AHEAD_BYTES))
            if most is not None and file.num_bytes + len(content) > most:
                raise too_large(most)
            self._digest.update(content)
            file.write(content)

    def _end_part(self) -> None:
        if self._field is not None:
            name, value = self._field
            self.fields[name] = value.decode(errors="replace")
        self._field = None
        self._in_file = False

    def _end(self) -> None:
        self.ended = True


@asynccontextmanager
async def received_form(
    request: Request,
    key: str,
    max_bytes: int | None = None,
    may_be_text: bool = False,
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
