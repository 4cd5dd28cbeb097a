"""Streams of rows on one engine: a running server, or one that is started for them."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from ..batch_api.lines import is_custom_id, loads_lenient
from ..batch_api.protocol import (
    ENDPOINTS,
    MAX_CUSTOM_ID_LEN,
    MAX_PRIORITY,
    canonical_url,
    error_body,
)
from ..errors import ConfigError, EngineError, InputError
from ..inputs.cells import NotJson, json_value, text_of
from ..inputs.template import Template, jinja_hint
from ..run.answer_table import text_in
from .own_server import OwnServer
from .waves import HttpTransport, QuietSender, WaveTransport

WINDOW = 8192
CHAT = "/v1/chat/completions"
# No attribute of a streamer, which may be pickled.
_STARTING = threading.Lock()


class Streamer:
    """Answers streams of rows, one after the other or at the same time.

    ::

        with Streamer(model_path="meta-llama/Llama-3.1-8B-Instruct") as streamer:
            for answer in streamer.stream(rows):
                print(answer.text)

    Args:
        model_path: of a model that is loaded in processes of its own, when the first stream
            starts, and unloaded by :meth:`close`.
        server: instead, the URL of a server that ``sglang-batch serve`` started.
        key: of the server.
        verify: file with the certificate authority of the server's certificate.
        priority: of the windows among the batches of the server, -1000 to 1000.
        backend: with ``model_path``, the ``--backend`` of ``sglang-batch serve``.
        options: with ``model_path``, options of ``sglang-batch serve`` such as ``tp=2``.

    Raises:
        ConfigError: neither or both of ``model_path`` and ``server`` are given, or an option
            cannot be used.
    """

    def __init__(
        self,
        *,
        model_path: str | None = None,
        server: str | None = None,
        key: str | None = None,
        verify: str | None = None,
        priority: int = 0,
        backend: str = "sglang",
        **options: Any,
    ) -> None:
        if (model_path is None) == (server is None):
            raise ConfigError(
                "name an engine: model_path='...' to load a model, or server='http://...' "
                "for a running server, and not both."
            )
        if server is not None and options:
            raise ConfigError(
                f"{next(iter(options))}: the server has its model and options already; "
                "leave it out."
            )
        if model_path is not None and (key is not None or verify is not None):
            raise ConfigError(
                "key and verify are of a running server: name it as server."
            )
        if abs(priority) > MAX_PRIORITY:
            raise ConfigError(
                f"priority={priority!r} must be {-MAX_PRIORITY} to {MAX_PRIORITY}."
            )
        self._model_path = model_path
        self._backend = backend
        self._options = options
        self._url = None if server is None else server.rstrip("/").removesuffix("/v1")
        self._key = key
        self._verify = verify
        self._priority = priority
        self._own: OwnServer | None = None
        self._open: set[StreamWindows] = set()

    def __enter__(self) -> Streamer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End open streams, and the engine if it is the streamer's own."""
        for windows in list(self._open):
            windows.close()
        if self._own is not None:
            self._own.close()
            self._own = None

    def start(self) -> None:
        """Load the model now, if there is one to load. A stream does so by itself.

        Raises:
            ConfigError: the model or an option cannot be used.
            EngineError: the engine did not start.
        """
        with _STARTING:
            if self._model_path is not None and self._own is None:
                own = OwnServer(self._model_path, self._backend, self._options)
                own.wait()
                self._own = own

    def stream(
        self,
        rows: Iterable[Any],
        *,
        url: str = CHAT,
        template: Mapping[str, Any] | str | None = None,
        id_column: str | None = None,
        ordered: bool = False,
        window: int = WINDOW,
    ) -> Iterator[StreamAnswer]:
        """Answer rows, each as soon as it is finished.

        Args:
            rows: of any number, read as they are needed, in another thread. Each is the body
                of a request, a line of a batch file, or with a template any mapping; or one
                of these as JSON text.
            url: the endpoint of rows that do not name theirs.
            template: the body of each request, with ``"{{column}}"`` for values of the row,
                as ``run --template`` has it. As text: JSON, or ``@FILE``.
            id_column: with a template, the column with the ``custom_id``.
            ordered: yield answers in the order of the rows.
            window: most rows that are planned together. Three times as many may be in memory.

        Raises:
            ConfigError: an argument cannot be used. Raised by the call.
            EngineError: the engine or the connection failed. Raised while iterating, after
                all answers that came before.
            Exception: an error of ``rows``, after the answers to those before it.
        """
        lines = RowLines(url, template, id_column)
        if window < 1:
            raise ConfigError(f"window={window!r} must be 1 or more.")
        return self._answers(rows, lines, window, ordered)

    def _answers(
        self, rows: Iterable[Any], lines: RowLines, window: int, ordered: bool
    ) -> Iterator[StreamAnswer]:
        self.start()
        windows = StreamWindows(rows, lines, self._transport(), window)
        self._open.add(windows)
        try:
            answers = windows.answers()
            for answer in in_order(answers) if ordered else answers:
                windows.taken()
                yield answer
        finally:
            self._open.discard(windows)
            windows.close()

    def _transport(self) -> HttpTransport:
        url, key = self._url, self._key
        if self._own is not None:
            url, key = self._own.url, self._own.key
        assert url is not None
        return HttpTransport(url, key, self._verify, self._priority, kind="lines")


def in_order(answers: Iterable[StreamAnswer]) -> Iterator[StreamAnswer]:
    """Answers by their index, from 0: each as soon as all before it have come."""
    waiting: dict[int, StreamAnswer] = {}
    due = 0
    for answer in answers:
        waiting[answer.index] = answer
        while due in waiting:
            yield waiting.pop(due)
            due += 1


def stream(
    rows: Iterable[Any],
    *,
    url: str = CHAT,
    template: Mapping[str, Any] | str | None = None,
    id_column: str | None = None,
    ordered: bool = False,
    window: int = WINDOW,
    **where: Any,
) -> Iterator[StreamAnswer]:
    """Answer rows, each as soon as it is finished. See :meth:`Streamer.stream`.

    Args:
        where: the engine, as the arguments of :class:`Streamer`. A model is loaded with the
            first answer that is asked for, and unloaded at the end.

    Raises:
        ConfigError: an argument cannot be used.
    """
    streamer = Streamer(**where)
    answers = streamer.stream(
        rows, url=url, template=template, id_column=id_column,
        ordered=ordered, window=window,
    )  # fmt: skip
    return _closing(streamer, answers)


def _closing(
    streamer: Streamer, answers: Iterator[StreamAnswer]
) -> Iterator[StreamAnswer]:
    with streamer:
        yield from answers


class AnswerColumns:
    """Answers the rows of a batch of columns, and adds the answers as columns.

    For ``map_batches`` of Ray Data and batch functions of Daft, which call it with one block of
    rows at a time. Each block is planned by itself, so blocks should be as large as memory
    allows. A model is loaded once for each copy of this object.

    Args:
        template: the body of each request, as of :meth:`.streamer.Streamer.stream`.
        url: the endpoint.
        text_column, error_column: of the answers. One of both is null in each row.
        body_column: of the whole answers as JSON text, if a name is given.
        where: the engine, as the arguments of :class:`.streamer.Streamer`.
    """

    def __init__(
        self,
        template: Mapping[str, Any] | str,
        *,
        url: str = CHAT,
        text_column: str = "answer",
        error_column: str = "error",
        body_column: str | None = None,
        **where: Any,
    ) -> None:
        self._streamer = Streamer(**where)
        self._template = template
        self._url = url
        self._names = (text_column, error_column, body_column)

    def __call__(self, batch: Any) -> Any:
        """Answer a batch.

        Args:
            batch: a pyarrow Table, or columns of equal length by name: lists or numpy arrays.

        Returns:
            The same columns, and those of the answers: of strings in a table, else lists.
        """
        names = [*getattr(batch, "column_names", batch), *filter(None, self._names)]
        for name in self._names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"two columns would be named {name!r}: choose others."
                )
        if hasattr(batch, "to_pylist"):
            rows = batch.to_pylist()
        else:
            columns = zip(*batch.values(), strict=True)
            rows = [dict(zip(batch, values, strict=True)) for values in columns]
        found = self._streamer.stream(
            rows, url=self._url, template=self._template,
            ordered=True, window=max(1, len(rows)),
        )  # fmt: skip
        answers = list(found)
        text, error, body = self._names
        added: dict[str, Any] = {
            text: [answer.text for answer in answers],
            error: [answer.error for answer in answers],
        }
        if body is not None:
            added[body] = [json.dumps(answer.body) for answer in answers]
        if not hasattr(batch, "to_pylist"):
            return {**batch, **added}
        import pyarrow as pa

        for name, values in added.items():
            batch = batch.append_column(name, pa.array(values, pa.string()))
        return batch

    def close(self) -> None:
        """Unload the model, if it is this object's own."""
        self._streamer.close()


# A window is one call, whose bytes a server limits.
MAX_ROW_BYTES = 32 << 20


@dataclass(frozen=True)
class StreamAnswer:
    """The answer to one row.

    index: number of the row, from 0.
    row: the row as it was given.
    custom_id: that of the row, or its number.
    status_code: HTTP status, 200 for an answer, 4xx and 5xx for an error.
    body: JSON of the answer as the endpoint gives it, or ``{"error": {...}}``.
    """

    index: int
    row: Any
    custom_id: str
    status_code: int
    body: Any

    @property
    def ok(self) -> bool:
        return self.status_code < 400

    @property
    def error(self) -> str | None:
        """The message of an error, or None for an answer."""
        return None if self.ok else str(self.body["error"]["message"])

    @cached_property
    def text(self) -> str | None:
        """What the model wrote, as :func:`text_in`. None for errors and other endpoints."""
        return text_in(self.body)


@dataclass(frozen=True, slots=True)
class StreamLine:
    """A row on its way.

    line: of a batch file, without a newline.
    refused: why the row cannot be sent, else empty.
    """

    index: int
    row: Any
    custom_id: str
    line: bytes
    refused: str

    def answered(self, status_code: int, body: bytes) -> StreamAnswer:
        """The row with its answer."""
        try:
            found = msgspec.json.decode(body)
        except msgspec.DecodeError:  # numbers that only Python reads
            found = json.loads(body)
        return StreamAnswer(self.index, self.row, self.custom_id, status_code, found)

    def refusal(self) -> StreamAnswer:
        """The answer to a row that cannot be sent."""
        body = error_body(self.refused, code="invalid_request")
        return StreamAnswer(self.index, self.row, self.custom_id, 400, body)


class RowLines:
    """Makes a line from each row.

    Args:
        url: endpoint of rows that name none.
        template: the body of each request, with ``"{{column}}"`` for values of the row. None:
            rows are bodies, or lines of a batch file.
        id_column: with a template, the column with the ``custom_id``.

    Raises:
        ConfigError: the endpoint is unknown, or the template uses no column.
    """

    def __init__(
        self,
        url: str,
        template: Mapping[str, Any] | str | None = None,
        id_column: str | None = None,
    ) -> None:
        self._url = canonical_url(url)
        if self._url not in ENDPOINTS:
            raise ConfigError(f"url={url!r} must be one of {', '.join(ENDPOINTS)}.")
        if id_column is not None and template is None:
            raise ConfigError(f"id_column={id_column!r} needs a template.")
        self._template = None if template is None else Template.of(template, self._url)
        self._id_column = id_column

    def line(self, row: Any, index: int) -> StreamLine:
        """The line of a row. One that cannot be sent says why."""
        custom_id, line, refused = str(index), b"", ""
        try:
            fields = _mapping(row)
            custom_id = self._custom_id(fields, custom_id)
            line = self._written(fields, custom_id)
            msgspec.json.decode(line)  # as the server does, for a whole window
        except NotJson as error:
            refused = f"row {index} holds {error}."
        except InputError as error:
            refused = f"row {index}: {error}."
        except msgspec.DecodeError:
            refused = (
                f"row {index} has half of a surrogate pair, which is no character."
            )
        except (ValueError, RecursionError) as error:
            refused = f"row {index} cannot be sent as JSON: {error}."
        if len(line) > MAX_ROW_BYTES:
            refused = (
                f"row {index}: the request has more than the {MAX_ROW_BYTES:,} bytes that a "
                "stream takes; run a batch, whose lines may be larger."
            )
        return StreamLine(index, row, custom_id, line, refused)

    def _custom_id(self, row: Mapping[str, Any], number: str) -> str:
        if self._template is None:
            found = row["custom_id"] if _is_line(row) and "custom_id" in row else number
        elif self._id_column is None:
            return number
        else:
            found = text_of(self._column(row, self._id_column))
        if not is_custom_id(found):
            raise InputError(
                f"its custom_id {found!r:.100} must be a string of 1 to "
                f"{MAX_CUSTOM_ID_LEN} characters"
            )
        return str(found)

    def _written(self, row: Mapping[str, Any], custom_id: str) -> bytes:
        url, method = self._url, "POST"
        if self._template is not None:
            for column in self._template.columns:
                self._column(row, column)
            body = self._template.fill(row)
        elif _is_line(row):
            url, method = row.get("url", url), row.get("method", method)
            body = json.dumps(json_value(row["body"]))
        else:
            body = json.dumps(json_value(row))
        found = {"custom_id": custom_id, "method": method, "url": url}
        start = json.dumps(json_value(found))
        return f'{start[:-1]}, "body": {body}}}'.encode()

    def _column(self, row: Mapping[str, Any], name: str) -> Any:
        if name not in row:
            raise InputError(
                f"it has no column {name!r}; its columns are "
                f"{', '.join(map(str, row)):.200}{jinja_hint(name)}"
            )
        return row[name]


def _is_line(row: Mapping[str, Any]) -> bool:
    """Whether a row is a line of a batch file. No endpoint's body has a ``body``."""
    return "body" in row


def _mapping(row: Any) -> Mapping[str, Any]:
    if isinstance(row, str | bytes):
        try:
            row = loads_lenient(row.encode() if isinstance(row, str) else row)
        except ValueError as error:
            raise InputError(f"it is not JSON: {error}") from None
    if not isinstance(row, Mapping):
        raise InputError(
            f"it must be a mapping or a JSON object; it is a {type(row).__name__}"
        )
    return row


# The windows of a stream: rows that are sent together, each window planned as a whole.
#
# Rows are read in a thread of its own, as far ahead as three windows, and windows are sent on an
# event loop in another one, so the engine works while the caller does something else.
#
# A stream may be endless, so it cannot be one plan. A window is sent when it is full or the rows
# have ended, or when none has come for the quiet time. It waits until no more requests are
# unanswered than keep the engine full: windows that run together need the KV of both.

# Windows whose rows may be in memory: read, and not yet taken by the caller.
MAX_WINDOWS = 3
# A window is sent while at most this part of one is unanswered, if the engine needs no fewer.
OVERLAP = 4
QUIET_S = 0.05
# A server takes waves of up to twice as many bytes.
MAX_WINDOW_BYTES = 64 << 20

_Found = StreamAnswer | BaseException | None
"""An answer, the error that ended the stream early, or None for its end."""


class StreamWindows(QuietSender):
    """Sends the lines of rows in windows and collects their answers.

    Args:
        rows: read once, in a thread.
        transport: sends windows. It is closed at the end.
        window: most rows of a window.
    """

    def __init__(
        self,
        rows: Iterable[Any],
        lines: RowLines,
        transport: WaveTransport,
        window: int,
    ) -> None:
        super().__init__(transport, "sglang-batch-stream")
        self._rows = rows
        self._lines = lines
        self._window = window
        self._room = threading.Semaphore(MAX_WINDOWS * window)
        self._found: queue.SimpleQueue[_Found] = queue.SimpleQueue()
        self._closed = threading.Event()
        # On the loop.
        self._pending: list[StreamLine] = []
        self._pending_bytes = 0
        self._unanswered = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False
        self._failure: BaseException | None = None
        threading.Thread(
            target=self._read, name="sglang-batch-rows", daemon=True
        ).start()

    # In the caller's thread -------------------------------------------------------------

    def answers(self) -> Iterator[StreamAnswer]:
        """The answers as they arrive.

        Raises:
            EngineError: the engine or the connection failed, after the answers that came
                before.
            Exception: an error of the rows, after the answers to those before it.
        """
        while (found := self._found.get()) is not None and not self._closed.is_set():
            if isinstance(found, BaseException):
                raise found
            yield found

    def taken(self) -> None:
        """The caller has taken an answer: another row may be read."""
        self._room.release()

    def close(self) -> None:
        """Stop reading, abort unanswered rows, and close the transport."""
        if self._closed.is_set():
            return
        self._closed.set()
        # The reader and the caller may wait for these.
        self._room.release()
        self._found.put(None)
        super().close()

    # In the reader's thread -------------------------------------------------------------

    def _read(self) -> None:
        failure: BaseException | None = None
        try:
            for index, row in enumerate(self._rows):
                self._room.acquire()
                if self._closed.is_set():
                    return
                self.post(self._add, self._lines.line(row, index))
        except BaseException as error:  # the caller's thread raises it
            failure = error
        self.post(self._end, failure)

    # On the loop --------------------------------------------------------------------------

    def _add(self, line: StreamLine) -> None:
        if line.refused:
            self._found.put(line.refusal())
            return
        if self._failure is not None:
            return
        if not self._pending:
            self._since = self._loop.time()
        self._pending.append(line)
        self._pending_bytes += len(line.line)
        self._schedule()

    def _end(self, failure: BaseException | None) -> None:
        self._ended = True
        self._failure = self._failure or failure
        self._schedule()

    def _schedule(self) -> None:
        """Send the next window or set its timer. Called after each change of state."""
        if not self._pending:
            if self._ended and not self._tasks:
                self._found.put(self._failure)
            return
        if not self._has_room():
            return
        if (
            self._ended
            or len(self._pending) >= self._window
            or self._pending_bytes >= MAX_WINDOW_BYTES
        ):
            self._send()
            return
        self._send_when_quiet(QUIET_S, self._send_pending)

    def _send_pending(self) -> None:
        if self._pending and self._has_room():
            self._send()

    def _has_room(self) -> bool:
        """Whether the engine may run out of requests soon."""
        full = self._transport.max_inflight or self._window
        return self._unanswered <= min(full, self._window // OVERLAP)

    def _send(self) -> None:
        """Send as many of the pending rows as a window takes."""
        size = number = 0
        for line in self._pending[: self._window]:
            size += len(line.line)
            number += 1
            if size >= MAX_WINDOW_BYTES:
                break
        window, self._pending = self._pending[:number], self._pending[number:]
        self._pending_bytes -= size
        self._unanswered += number
        task = self._loop.create_task(self._run(window))
        self._tasks.add(task)
        task.add_done_callback(self._ran)

    def _ran(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._schedule()

    async def _run(self, window: list[StreamLine]) -> None:
        answered = [False] * len(window)

        def on_answer(index: int, status_code: int, body: bytes) -> None:
            if answered[index]:
                return
            answered[index] = True
            self._unanswered -= 1
            self._found.put(window[index].answered(status_code, body))
            if self._pending and self._has_room():
                self._schedule()

        try:
            await self._transport.send([line.line for line in window], on_answer)
        except Exception as error:
            if not isinstance(error, EngineError):
                error = EngineError(f"a window failed: {type(error).__name__}: {error}")
            self._fail(error)
        self._unanswered -= answered.count(False)

    def _fail(self, error: EngineError) -> None:
        """No further window is sent. The stream ends when those in flight have."""
        self._failure = self._failure or error
        self._ended = True
        self._pending, self._pending_bytes = [], 0

    def _abort(self) -> list[asyncio.Task[None]]:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks
