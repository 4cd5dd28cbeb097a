"""Calls of many threads, gathered into waves that the engine gets whole.

A frontend program blocks in its thread for each generation. Sent one by one, the
engine sees a trickle and cannot plan. Here the calls of all threads meet in a
:class:`WaveLane`, leave as a wave when waiting longer would gain nothing, and each
thread goes on the moment *its* answer is there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Protocol

from .errors import EngineError

logger = logging.getLogger(__name__)

# With nothing in the engine, a program that still computes is given this many times
# the quiet time to join the wave: a wave cut in two costs more than the wait.
IDLE_PATIENCE = 10
# A call never waits longer than this many quiet times, however fast others arrive.
MAX_QUIET_TIMES = 20
# How often a waiting thread makes sure that somebody is left to answer it.
ALIVE_CHECK_S = 2.0

Answer = Callable[[int, int, bytes], None]


class Transport(Protocol):
    """Takes waves to an engine."""

    def check_caller(self) -> None:
        """Raise EngineError if the current thread must not wait for an answer."""
        ...

    def open_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that ``send`` belongs on."""
        ...

    async def send(self, bodies: list[bytes], answer: Answer) -> None:
        """Run a wave; calls ``answer(index, status, body)`` once per request."""
        ...

    async def close(self) -> None:
        """Give back what ``send`` opened; the last call on the loop."""
        ...

    def close_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the loop back; it runs no longer."""
        ...


class Run:
    """The programs of one ``run_batch``, which are stopped together.

    stop_reason: why they were; a call they make from then on fails with it.
    """

    def __init__(self) -> None:
        self.stop_reason: str | None = None
        self._stopped_at = 0.0
        self._on_stop: Callable[[], None] | None = None

    def enter(self, *, program: bool) -> None:
        """Count the current thread to this run.

        Args:
            program: whether it executes programs.
        """
        _caller.set((self, threading.get_ident() if program else 0))

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called at the stop, at once if that was before."""
        self._on_stop = callback
        if self.stop_reason is not None:
            callback()

    def stop(self, reason: str) -> None:
        """Stop the run; once is enough, more do no harm."""
        self._stopped_at = time.monotonic()
        self.stop_reason = reason
        if self._on_stop is not None:
            self._on_stop()

    def stopped_for(self, seconds: float) -> bool:
        """Whether the run was stopped that long ago."""
        return (
            self.stop_reason is not None
            and time.monotonic() - self._stopped_at > seconds
        )


# Threads that a program starts for its forks inherit this, so they belong to the same
# run; the thread id tells the program's own thread from theirs.
_caller: ContextVar[tuple[Run | None, int]] = ContextVar("caller", default=(None, 0))


class Call:
    """One request on its way, and the promise of an answer to its thread."""

    __slots__ = ("body", "future", "in_program_thread", "run", "sent")

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.future: Future[tuple[int, bytes]] = Future()
        self.run, thread_id = _caller.get()
        self.in_program_thread = thread_id == threading.get_ident()
        self.sent = False

    @property
    def stop_reason(self) -> str | None:
        return self.run.stop_reason if self.run else None


class WaveLane:
    """Collects calls and sends them, on the transport's event loop.

    A wave leaves when every live program waits for an answer and none is on its way,
    so that nothing could join it; or when no call has come for the quiet time. The
    second rule serves programs that wait for something else, such as their forks.
    """

    def __init__(
        self, transport: Transport, quiet_s: float, wave_sizes: deque[int]
    ) -> None:
        self._transport = transport
        self._quiet_s = quiet_s
        self._wave_sizes = wave_sizes
        self._pending: list[Call] = []
        self._waves: dict[asyncio.Task[None], list[Call]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0  # when the oldest pending call began to wait
        self._starting = 0  # runs that are still starting their threads
        self._live = 0  # program threads
        self._waiting = 0  # program threads that wait for an answer
        self._in_flight = 0  # calls sent and not answered
        self._loop = transport.open_loop()
        self._thread: threading.Thread | None = None
        # The owner of an engine may run its loop already, in a thread of their own.
        if not self._loop.is_running():
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="sglang-batch-waves", daemon=True
            )
            self._thread.start()

    # From any thread ------------------------------------------------------------

    def post(self, change: Callable[..., None], *args: Any) -> None:
        """Apply a change on the loop; without effect once the loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(change, *args)

    def ask(self, call: Call) -> tuple[int, bytes]:
        """Send one call with the next wave and wait for its answer."""
        self.post(self._add, call)
        while True:
            try:
                return call.future.result(ALIVE_CHECK_S)
            except TimeoutError:
                if not call.future.done() and not self._loop.is_running():
                    raise EngineError(
                        "the event loop that serves this backend was stopped while a "
                        "program waited; do not run the engine's loop yourself while "
                        "programs run."
                    ) from None

    def close(self) -> None:
        """Stop what is still under way and give the event loop back."""
        if self._loop.is_running():
            finish = asyncio.run_coroutine_threadsafe(self._finish(), self._loop)
            while not finish.done() and self._loop.is_running():
                with suppress(Exception):
                    finish.result(ALIVE_CHECK_S)
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._transport.close_loop(self._loop)

    # On the loop ------------------------------------------------------------------

    def begin(self, num_threads: int) -> None:
        """A run starts this many program threads; nothing is sent meanwhile."""
        self._live += num_threads
        self._starting += 1

    def started(self, num_missing: int) -> None:
        """All threads of a run were started, except this many."""
        self._live -= num_missing
        self._starting -= 1
        self._since = self._loop.time()
        self._reconsider()

    def leave(self) -> None:
        """A program thread ended."""
        self._live -= 1
        self._reconsider()

    def cancel(self, run: Run) -> None:
        """Fail the calls of a stopped run; a wave left without any is aborted."""
        waves = self._waves.values()
        for call in [*self._pending, *(call for wave in waves for call in wave)]:
            if call.run is run:
                self._fail(call, str(run.stop_reason))
        self._pending = [call for call in self._pending if not call.future.done()]
        self._abort(lambda wave: all(call.future.done() for call in wave))

    def _abort(self, condition: Callable[[list[Call]], bool]) -> None:
        for task, wave in self._waves.items():
            if condition(wave):
                task.cancel()

    def _add(self, call: Call) -> None:
        self._waiting += call.in_program_thread
        if call.stop_reason is not None:
            self._fail(call, call.stop_reason)
            return
        if not self._pending:
            self._since = self._loop.time()
        self._pending.append(call)
        self._reconsider()

    def _reconsider(self) -> None:
        """Send, or set the time to; after each change that the rules look at."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._pending or self._starting:
            return
        idle = not self._in_flight
        if idle and self._waiting >= self._live:
            self._send()
            return
        quiet = self._quiet_s * (IDLE_PATIENCE if idle else 1)
        latest = self._since + MAX_QUIET_TIMES * quiet
        at = min(self._loop.time() + quiet, latest)
        self._timer = self._loop.call_at(at, self._send)

    def _send(self) -> None:
        self._timer = None
        wave, self._pending = self._pending, []
        for call in wave:
            call.sent = True
        self._in_flight += len(wave)
        self._wave_sizes.append(len(wave))
        task = self._loop.create_task(self._run_wave(wave))
        self._waves[task] = wave
        task.add_done_callback(self._waves.pop)

    async def _run_wave(self, wave: list[Call]) -> None:
        def answer(index: int, status: int, body: bytes) -> None:
            self._settle(wave[index], lambda future: future.set_result((status, body)))
            self._reconsider()

        reason = f"a wave of {len(wave)} calls ended without an answer to this one."
        try:
            await self._transport.send([call.body for call in wave], answer)
        except Exception as error:
            if not isinstance(error, EngineError):
                logger.exception("A wave of %d calls failed", len(wave))
            reason = f"a wave of {len(wave)} calls failed: {error}"
        finally:
            for call in wave:
                self._fail(call, reason)
            self._reconsider()

    def _fail(self, call: Call, reason: str) -> None:
        # Each thread gets an exception of its own to hang its traceback on.
        self._settle(call, lambda future: future.set_exception(EngineError(reason)))

    def _settle(self, call: Call, settle: Callable[[Future[Any]], None]) -> None:
        if call.future.done():
            return
        self._waiting -= call.in_program_thread
        self._in_flight -= call.sent
        settle(call.future)

    async def _finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        waves = list(self._waves)
        self._abort(lambda wave: not all(call.future.done() for call in wave))
        await asyncio.gather(*waves, return_exceptions=True)
        await self._transport.close()
