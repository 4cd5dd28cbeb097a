"""Responses with result lines, of ended batches and of running ones."""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec
from fastapi.responses import FileResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.responses import MalformedRangeHeader
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Receive, Scope, Send

from ...batch_api import protocol as api
from ...batch_api.lines import ResultLine
from ...store.batch_store import BatchStore, Row
from ...store.result_log import finished_lines, line_index

JSONL, BYTES = "application/jsonl", "application/octet-stream"
_RESULT_ID = re.compile(r"file-(output|error)-([0-9a-f]{32})")
_BLOCK = 1 << 18
_conditions = StaticFiles(check_dir=False)


def file_response(
    store: BatchStore, file_id: str, owner: str | None
) -> Response | None:
    """The contents of a file, or None if no file has this id."""
    row = store.get_file(file_id, owner)
    path = store.file_path(file_id)
    if row is None or not path.exists():
        return None
    filename = row["filename"]
    kind = JSONL if filename.endswith(".jsonl") else BYTES
    return _StoredFile(
        path,
        media_type=kind,
        filename=_base_name(filename),
        headers={"X-Incomplete": "false"},
        stat_result=path.stat(),
    )


class _StoredFile(FileResponse):
    """A file, or 304 for a client that says it has it."""

    @classmethod
    def _parse_range_header(
        cls, http_range: str, file_size: int
    ) -> list[tuple[int, int]]:
        with suppress(MalformedRangeHeader):
            return super()._parse_range_header(http_range, file_size)
        return []  # the whole file, by RFC 9110 (14.2)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = Headers(scope=scope)
        if asked.get("if-none-match", "").strip() == "*" or (
            _conditions.is_not_modified(self.headers, asked)
        ):
            await NotModifiedResponse(self.headers)(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def _base_name(filename: str) -> str:
    """A file's name without directories, of any system, and control characters."""
    name = re.split(r"[/\\]", filename)[-1]
    name = "".join(char for char in name if char.isprintable()).strip(" .")
    return name or "file"


def results_so_far(
    store: BatchStore, file_id: str, owner: str | None
) -> Response | None:
    """The finished lines of a running batch's result file, or None for other files."""
    found = _RESULT_ID.fullmatch(file_id)
    if found is None:
        return None
    kind, name = found.groups()
    batch = store.get_batch(f"batch_{name}", owner)
    if batch is None:
        return None
    log = _open_log(store, batch)
    if log is None:
        return _empty(store, batch)
    lines = finished_lines(log, os.fstat(log.fileno()).st_size, ok=kind == "output")
    return _LinesResponse(lines, [log], {"X-Incomplete": "true"})


def batch_results(store: BatchStore, batch: Row, after_line: int) -> Response:
    """A batch's lines but the first ones: as they ended, then in input order."""
    log = _open_log(store, batch)
    if log is None:
        return _empty(store, batch) or _final_results(store, batch["id"], after_line)
    last_line, end = line_index(_log_path(store, batch)).seek(log, after_line)
    return _LinesResponse(finished_lines(log, end), [log], _headers(True, last_line))


def _final_results(store: BatchStore, batch_id: str, after_line: int) -> Response:
    batch = store.get_batch(batch_id)
    files = []
    for key in ("output_file_id", "error_file_id"):
        file_id = batch and batch[key]
        # As over /v1/files, the lines of a deleted file are not shown.
        if file_id and store.get_file(file_id) is not None:
            file = _opened(store.file_path(file_id))
            files += [] if file is None else [file]
    last_line = 0
    for file in files:
        last_line += _count_lines(file, os.fstat(file.fileno()).st_size)
        file.seek(0)
    lines = heapq.merge(*files, key=_input_index)
    rest = islice(lines, after_line, None)
    return _LinesResponse(rest, files, _headers(False, last_line))


def _open_log(store: BatchStore, batch: Row) -> BinaryIO | None:
    """The log of a running batch. None before its first result and after its end."""
    if batch["status"] not in api.ACTIVE_STATUSES:
        return None
    return _opened(_log_path(store, batch))


def _log_path(store: BatchStore, batch: Row) -> Path:
    return store.work_dir(batch["id"]) / "results.jsonl"


def _opened(path: Path) -> BinaryIO | None:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        return None


def _empty(store: BatchStore, batch: Row) -> Response | None:
    """A response without lines, or None if the batch has ended in the meantime."""
    now = store.get_batch(batch["id"])
    if now is None or now["status"] not in api.ACTIVE_STATUSES:
        return None
    return Response(b"", media_type=JSONL, headers=_headers(True, 0))


def _headers(incomplete: bool, last_line: int) -> dict[str, str]:
    return {
        "X-Incomplete": str(incomplete).lower(),
        "X-Last-Line": str(last_line),
        "X-Line-Order": "completion" if incomplete else "input",
    }


def _input_index(line: bytes) -> int:
    """The request's index in the input. 0 for a line that cannot be read."""
    with suppress(msgspec.DecodeError, ValueError):
        return msgspec.json.decode(line, type=ResultLine).index
    return 0


def _count_lines(file: BinaryIO, end: int) -> int:
    count = 0
    while block := file.read(min(_BLOCK, end - file.tell())):
        count += block.count(b"\n")
    return count


class _LinesResponse(StreamingResponse):
    """Streams lines of files, and closes them at the end or when the client leaves."""

    def __init__(
        self, lines: Iterable[bytes], files: Iterable[BinaryIO], headers: dict[str, str]
    ) -> None:
        super().__init__(in_blocks(lines), media_type=JSONL, headers=headers)
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for file in self._files:
                file.close()


def in_blocks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Join lines into larger blocks, as each block costs a switch of threads."""
    block = bytearray()
    for line in lines:
        block += line
        if len(block) >= _BLOCK:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)
