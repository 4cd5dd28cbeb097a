"""The windows of a stream: rows that are sent together, each window planned as a whole.

Rows are read in a thread of its own, as far ahead as three windows, and windows are sent on an
event loop in another one, so the engine works while the caller does something else.

A stream may be endless, so it cannot be one plan. A window is sent when it is full or the rows
have ended, or when none has come for the quiet time. It waits until no more requests are
unanswered than keep the engine full: windows that run together need the KV of both.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Protocol

from ..errors import EngineError
from .stream_rows import RowLines, StreamAnswer, StreamLine
from .waves import WaveTransport

# Windows whose rows may be in memory: read, and not yet taken by the caller.
MAX_WINDOWS = 3
# A window is sent while at most this part of one is unanswered, if the engine needs no fewer.
OVERLAP = 4
QUIET_S = 0.05
# The longest that a row waits, in quiet times, however fast others come.
MAX_QUIET_TIMES = 20
# A server takes waves of up to twice as many bytes.
MAX_WINDOW_BYTES = 64 << 20

_Found = StreamAnswer | BaseException | None
"""An answer, the error that ended the stream early, or None for its end."""


class WindowTransport(WaveTransport, Protocol):
    """Sends windows, and knows after the first how many requests keep the engine full."""

    max_inflight: int | None


class StreamWindows:
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
        transport: WindowTransport,
        window: int,
    ) -> None:
        self._rows = rows
        self._lines = lines
        self._transport = transport
        self._window = window
        self._room = threading.Semaphore(MAX_WINDOWS * window)
        self._found: queue.SimpleQueue[_Found] = queue.SimpleQueue()
        self._closed = threading.Event()
        # On the loop.
        self._loop = transport.open_loop()
        self._pending: list[StreamLine] = []
        self._pending_bytes = 0
        self._since = 0.0  # when the oldest pending row came, in loop time
        self._timer: asyncio.TimerHandle | None = None
        self._unanswered = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False
        self._failure: BaseException | None = None
        self._sender = threading.Thread(
            target=self._loop.run_forever, name="sglang-batch-stream", daemon=True
        )
        self._reader = threading.Thread(
            target=self._read, name="sglang-batch-rows", daemon=True
        )
        self._sender.start()
        self._reader.start()

    # In the caller's thread -------------------------------------------------------------

    def answers(self) -> Iterator[StreamAnswer]:
        """The answers as they arrive.

        Raises:
            EngineError: the engine or the connection failed. Answers that came before are
                yielded first.
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
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._sender.join()
        self._transport.close_loop(self._loop)

    # In the reader's thread -------------------------------------------------------------

    def _read(self) -> None:
        failure: BaseException | None = None
        try:
            for index, row in enumerate(self._rows):
                self._room.acquire()
                if self._closed.is_set():
                    return
                self._post(self._add, self._lines.line(row, index))
        except BaseException as error:  # the caller's thread raises it
            failure = error
        self._post(self._end, failure)

    def _post(self, change: Any, argument: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(change, argument)

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
        if self._timer is not None:
            self._timer.cancel()
        latest = self._since + MAX_QUIET_TIMES * QUIET_S
        at = min(self._loop.time() + QUIET_S, latest)
        self._timer = self._loop.call_at(at, self._send_quiet)

    def _send_quiet(self) -> None:
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

    async def _finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transport.close()
