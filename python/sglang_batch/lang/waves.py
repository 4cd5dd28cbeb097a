"""Waves: calls from many threads, collected and sent to the engine together.

A frontend program blocks its thread during each generation. If calls were sent one by one,
the engine could not plan them. A :class:`WaveLane` sends the calls of all threads as a wave
once waiting longer would gain nothing. Each thread continues as soon as *its* answer arrives.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from ..errors import EngineError

logger = logging.getLogger(__name__)

# While the engine is idle, a wave waits this many quiet times for programs that are
# still computing: splitting a wave costs more than the wait.
IDLE_PATIENCE = 10
# The most quiet times that a call waits, however fast others arrive.
MAX_QUIET_TIMES = 20
# How often a waiting thread checks that the event loop still runs.
ALIVE_CHECK_S = 2.0

# Takes the index of a call in its wave, an HTTP status, and the body of the answer.
OnAnswer = Callable[[int, int, bytes], None]


class WaveTransport(ABC):
    """Sends waves to an engine.

    Attributes:
        max_inflight: how many requests keep the engine full, None before it has said so.
    """

    max_inflight: int | None = None

    def check_caller(self) -> None:
        """Raise EngineError if the current thread must not block for an answer."""

    def open_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which ``send`` must run."""
        return asyncio.new_event_loop()

    @abstractmethod
    async def send(self, bodies: list[bytes], on_answer: OnAnswer) -> None:
        """Run a wave of native ``/generate`` bodies, each answered once.

        Raises:
            EngineError: some answers are missing.
        """

    async def close(self) -> None:
        """Close everything that ``send`` opened. The last call on the loop."""

    def close_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the loop if the transport owns it. It no longer runs."""
        loop.close()


class ProgramGroup:
    """The programs of one ``run_batch``, which are stopped together. Later calls of the
    programs fail with ``stop_reason``.
    """

    def __init__(self) -> None:
        self.stop_reason: str | None = None
        self._stopped_at = 0.0
        self._on_stop: Callable[[], None] | None = None

    def enter(self, *, program: bool) -> None:
        """Make the calls of the current thread belong to this group. ``program``: it executes
        programs.
        """
        _caller.set((self, threading.get_ident() if program else 0))

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at the stop, or now if the group was stopped already."""
        self._on_stop = callback
        if self.stop_reason is not None:
            callback()

    def stop(self, reason: str) -> None:
        """Stop all programs of the group."""
        self._stopped_at = time.monotonic()
        self.stop_reason = reason
        if self._on_stop is not None:
            self._on_stop()

    def stopped_for(self, seconds: float) -> bool:
        """Whether the group was stopped more than this long ago."""
        return (
            self.stop_reason is not None
            and time.monotonic() - self._stopped_at > seconds
        )


# Inherited by the threads that a program starts for its forks, so that they belong to
# the same group. Only the program's own thread has this thread id.
_caller: ContextVar[tuple[ProgramGroup | None, int]] = ContextVar(
    "caller", default=(None, 0)
)


class WaveCall:
    """One request of a thread, and a future for its answer."""

    __slots__ = ("body", "future", "group", "in_program_thread", "sent")

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.future: Future[tuple[int, bytes]] = Future()
        self.group, thread_id = _caller.get()
        self.in_program_thread = thread_id == threading.get_ident()
        self.sent = False

    @property
    def stop_reason(self) -> str | None:
        return self.group.stop_reason if self.group else None


class QuietSender(ABC):
    """Sends what was collected over a transport, on its event loop, once it is quiet.

    The loop runs in a thread of the sender, unless its owner runs it already.
    """

    def __init__(self, transport: WaveTransport, thread_name: str) -> None:
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0  # when the oldest pending item arrived, in loop time
        self._loop = transport.open_loop()
        self._thread: threading.Thread | None = None
        if not self._loop.is_running():
            self._thread = threading.Thread(
                target=self._loop.run_forever, name=thread_name, daemon=True
            )
            self._thread.start()

    def post(self, change: Callable[..., None], *args: Any) -> None:
        """Apply a change on the loop, from any thread. No effect once it is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(change, *args)

    def close(self) -> None:
        """Abort what is in flight and close the loop, if the transport owns it."""
        if self._loop.is_running():
            finish = asyncio.run_coroutine_threadsafe(self._finish(), self._loop)
            while not finish.done() and self._loop.is_running():
                with suppress(Exception):
                    finish.result(ALIVE_CHECK_S)
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._transport.close_loop(self._loop)

    def _send_when_quiet(self, quiet_s: float, send: Callable[[], None]) -> None:
        """Send after the quiet time, unless this is called again before it is over."""
        if self._timer is not None:
            self._timer.cancel()
        latest = self._since + MAX_QUIET_TIMES * quiet_s
        at = min(self._loop.time() + quiet_s, latest)
        self._timer = self._loop.call_at(at, send)

    @abstractmethod
    def _abort(self) -> list[asyncio.Task[None]]:
        """Abort calls in flight. Returns all tasks."""

    async def _finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*self._abort(), return_exceptions=True)
        await self._transport.close()


class WaveLane(QuietSender):
    """Collects calls and sends them as waves, on the transport's event loop.

    A wave is sent when every live program waits for an answer and no call is in flight,
    since nothing could join it; and when no call has arrived for the quiet time, since some
    programs may wait for something else, such as their forks.

    Args:
        quiet_s: the quiet time, in seconds.
        wave_sizes: the size of each wave is appended here.
    """

    def __init__(
        self, transport: WaveTransport, quiet_s: float, wave_sizes: deque[int]
    ) -> None:
        self._quiet_s = quiet_s
        self._wave_sizes = wave_sizes
        self._pending: list[WaveCall] = []
        self._waves: dict[asyncio.Task[None], list[WaveCall]] = {}
        self._starting = 0  # groups that are still starting their threads
        self._live = 0  # program threads
        self._waiting = 0  # program threads that wait for an answer
        self._in_flight = 0  # calls sent but not answered
        super().__init__(transport, "sglang-batch-waves")

    # From any thread ------------------------------------------------------------

    def answer_to(self, call: WaveCall) -> tuple[int, bytes]:
        """Send a call with the next wave, and block until its HTTP status and body.

        Raises:
            EngineError: the wave failed, the call was stopped, or the loop no longer runs.
        """
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

    # On the loop ------------------------------------------------------------------

    def begin(self, num_threads: int) -> None:
        """A group starts this many program threads. No wave is sent meanwhile."""
        self._live += num_threads
        self._starting += 1

    def started(self, num_missing: int) -> None:
        """All threads of a group were started, except this many."""
        self._live -= num_missing
        self._starting -= 1
        self._since = self._loop.time()
        self._schedule()

    def leave(self) -> None:
        """A program thread ended."""
        self._live -= 1
        self._schedule()

    def cancel(self, group: ProgramGroup) -> None:
        """Fail the calls of a stopped group. Aborts waves with no other calls."""
        waves = self._waves.values()
        for call in [*self._pending, *(call for wave in waves for call in wave)]:
            if call.group is group:
                self._fail(call, str(group.stop_reason))
        self._pending = [call for call in self._pending if not call.future.done()]
        for task, wave in self._waves.items():
            if all(call.future.done() for call in wave):
                task.cancel()

    def _abort(self) -> list[asyncio.Task[None]]:
        for task, wave in self._waves.items():
            if not all(call.future.done() for call in wave):
                task.cancel()
        return list(self._waves)

    def _add(self, call: WaveCall) -> None:
        self._waiting += call.in_program_thread
        if call.stop_reason is not None:
            self._fail(call, call.stop_reason)
            return
        if not self._pending:
            self._since = self._loop.time()
        self._pending.append(call)
        self._schedule()

    def _schedule(self) -> None:
        """Send the next wave or set its timer. Called after each change of state."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._pending or self._starting:
            return
        idle = not self._in_flight
        if idle and self._waiting >= self._live:
            self._send()
            return
        quiet_s = self._quiet_s * (IDLE_PATIENCE if idle else 1)
        self._send_when_quiet(quiet_s, self._send)

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

    async def _run_wave(self, wave: list[WaveCall]) -> None:
        def on_answer(index: int, status: int, body: bytes) -> None:
            self._settle(wave[index], lambda future: future.set_result((status, body)))
            self._schedule()

        reason = f"a wave of {len(wave)} calls ended without an answer to this one."
        try:
            await self._transport.send([call.body for call in wave], on_answer)
        except Exception as error:
            if not isinstance(error, EngineError):
                logger.exception("A wave of %d calls failed", len(wave))
            reason = f"a wave of {len(wave)} calls failed: {error}"
        finally:
            for call in wave:
                self._fail(call, reason)
            self._schedule()

    def _fail(self, call: WaveCall, reason: str) -> None:
        # Each thread raises an exception of its own, since raising adds a traceback.
        self._settle(call, lambda future: future.set_exception(EngineError(reason)))

    def _settle(self, call: WaveCall, settle: Callable[[Future[Any]], None]) -> None:
        if call.future.done():
            return
        self._waiting -= call.in_program_thread
        self._in_flight -= call.sent
        settle(call.future)
