"""Multipart forms whose file goes straight to the store's disk, never to memory."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ..errors import ApiError

MAX_FIELD_BYTES = 1 << 20  # of all fields that are not files, together
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class FormFile:
    """A file of a form, on the disk of the store under a name of its own."""

    path: Path
    filename: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Form:
    """A form that was received whole; ``file`` is None where it has none."""

    fields: dict[str, str]
    file: FormFile | None


class _FileSink:
    """A file that is being received.

    Once it cannot be kept, because it is too large or the disk is full, it is removed
    and the rest of it is dropped: an answer in the middle of a body would reach a
    client that still sends as a broken connection.
    """

    def __init__(self, filename: str, directory: Path, max_bytes: int | None) -> None:
        self.filename = filename
        self.error: Exception | None = None
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._digest = hashlib.sha256()
        fd, path = tempfile.mkstemp(dir=directory)
        self.path = Path(path)
        self._file = os.fdopen(fd, "wb", buffering=0)

    def write(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self.error is not None:
            return
        if self._max_bytes is not None and self._num_bytes > self._max_bytes:
            self._give_up(too_large(self._max_bytes))
            return
        self._digest.update(data)
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._give_up(error)

    def close(self) -> FormFile:
        self._file.close()
        return FormFile(self.path, self.filename, self._digest.hexdigest())

    def discard(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _give_up(self, error: Exception) -> None:
        self.error = error
        self.discard()


class _Receiver:
    """Takes a multipart body apart; of its files it keeps the first of one name."""

    def __init__(
        self,
        boundary: bytes,
        key: str,
        directory: Path,
        max_bytes: int | None,
        may_be_text: bool,
    ) -> None:
        self.fields: dict[str, str] = {}
        self.sink: _FileSink | None = None
        self.error: Exception | None = None
        self.ended = False
        self._key = key
        self._may_be_text = may_be_text
        self._directory = directory
        self._max_bytes = max_bytes
        self._field_bytes = 0
        self._header = bytearray(), bytearray()
        self._disposition = b""
        # Where the content of the part goes; neither is nowhere.
        self._field: tuple[str, bytearray] | None = None
        self._in_file = False
        self._parser = MultipartParser(
            boundary,
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
        self._parser.write(data)

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
        _, options = parse_options_header(self._disposition)
        self._disposition = b""
        name = options.get(b"name", b"").decode(errors="replace")
        filename = options.get(b"filename")
        if filename is None and self._may_be_text and name == self._key:
            filename = b""
        if filename is None:
            self._field = name, bytearray()
        elif name == self._key and self.sink is None and self.error is None:
            try:
                self.sink = _FileSink(
                    filename.decode(errors="replace"), self._directory, self._max_bytes
                )
                self._in_file = True
            except OSError as error:
                self.error = error

    def _content(self, data: bytes, start: int, end: int) -> None:
        if self._field is not None:
            self._field_bytes += end - start
            if self._field_bytes > MAX_FIELD_BYTES:
                message = f"The form's fields have more than {MAX_FIELD_BYTES} bytes."
                self.error = ApiError(400, message)
            else:
                self._field[1].extend(data[start:end])
        elif self._in_file and self.sink is not None:
            self.sink.write(data[start:end])

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
    directory: Path,
    max_bytes: int | None = None,
    may_be_text: bool = False,
) -> AsyncIterator[Form]:
    """The form of a request; its file is gone when the block ends, unless moved.

    Args:
        key: name of the form's field that is the file; other files are dropped.
        directory: where the file is put, on the disk where it is to stay.
        max_bytes: size of the largest file that is taken.
        may_be_text: whether a field of this name is the file, too.

    Raises:
        ApiError: 400, the body is no whole form; 413, the file is too large.
        OSError: the file cannot be written.
    """
    content_type, options = parse_options_header(request.headers.get("content-type"))
    if content_type != b"multipart/form-data":
        async with request.form() as plain:
            yield Form({k: v for k, v in plain.items() if isinstance(v, str)}, None)
        return
    if b"boundary" not in options:
        raise ApiError(400, "Missing boundary in the multipart form.")
    receiver: _Receiver | None = None
    try:
        receiver = _Receiver(
            options[b"boundary"], key, directory, max_bytes, may_be_text
        )
        await _receive(request, receiver)
        sink = receiver.sink
        file = None if sink is None else await asyncio.to_thread(sink.close)
        yield Form(receiver.fields, file)
    except FormParserError as error:
        raise ApiError(400, f"The form cannot be parsed: {error}.") from None
    finally:
        if receiver is not None and receiver.sink is not None:
            receiver.sink.discard()


async def _receive(request: Request, receiver: _Receiver) -> None:
    """Read the whole body, a block at a time, in threads: it is written to disk."""
    waiting = bytearray()
    async for data in request.stream():
        waiting += data
        if len(waiting) >= _BLOCK:
            await asyncio.to_thread(receiver.write, bytes(waiting))
            waiting.clear()
    await asyncio.to_thread(receiver.write, bytes(waiting))
    error = receiver.error or (receiver.sink and receiver.sink.error)
    if error:
        raise error
    if not receiver.ended:
        raise ApiError(400, "The form ends before its last boundary.")


def too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The file is larger than the {max_bytes} bytes that this server takes.",
        param="file",
        code="file_too_large",
        retry=False,
    )
