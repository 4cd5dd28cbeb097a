"""Waves: calls from many threads, collected and sent to the engine together.

A frontend program blocks its thread during each generation. If calls were sent one by one,
the engine could not plan them. A :class:`WaveLane` sends the calls of all threads as a wave
once waiting longer would gain nothing. Each thread continues as soon as *its* answer arrives.
A transport brings them to a server over HTTP, or to an engine in this process.
"""

from __future__ import annotations

import asyncio
import io
import logging
import signal
import socket
import ssl
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import aiohttp
import msgspec
import orjson

from ..batch_api.equal_requests import find_equal
from ..batch_api.protocol import INTERACTIVE_PRIORITY
from ..config import OfflineBatchConfig
from ..errors import ApiError, ConfigError, EngineError, InputError
from ..job.engine import GENERATE_URL, MAX_INFLIGHT, WAVE_PATH
from ..job.job import Job, JobOptions
from ..request import BatchRequestInput, LineSplitter, authorization

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
        loop: of its owner, on which ``send`` must run. None: any loop.
    """

    max_inflight: int | None = None
    loop: asyncio.AbstractEventLoop | None = None

    def check_caller(self) -> None:
        """Raise EngineError if the current thread must not block for an answer."""

    @abstractmethod
    async def send(self, bodies: list[bytes], on_answer: OnAnswer) -> None:
        """Run a wave of native ``/generate`` bodies, each answered once.

        Raises:
            EngineError: some answers are missing.
        """

    async def close(self) -> None:
        """Close everything that ``send`` opened. The last call on the loop."""


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
        self._loop = transport.loop or asyncio.new_event_loop()
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
        """Abort what is in flight, and close the loop if it is the sender's own."""
        if self._loop.is_running():
            finish = asyncio.run_coroutine_threadsafe(self._finish(), self._loop)
            while not finish.done() and self._loop.is_running():
                with suppress(Exception):
                    finish.result(ALIVE_CHECK_S)
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            if self._transport.loop is None:
                self._loop.close()

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


KEPT_WAVE_SIZES = 10_000


class RequestError(ApiError, RuntimeError):
    """The engine answered one call with an error. Other calls are unaffected."""


class WaveClient:
    """Sends calls from any thread in waves over one transport.

    The transport's event loop runs in a thread of this client, but only while calls are in
    flight or a lane is held. At other times the owner of an engine can use its loop.

    Args:
        quiet_s: while the engine is busy, a wave is sent when no call has arrived for this
            many seconds.

    Raises:
        ConfigError: ``quiet_s`` is not above 0.
    """

    def __init__(self, transport: WaveTransport, quiet_s: float) -> None:
        if not quiet_s > 0:
            raise ConfigError(f"quiet_s={quiet_s!r} must be above 0, such as 0.01.")
        self.transport = transport
        self._quiet_s = quiet_s
        self._lock = threading.Lock()
        self._lane: WaveLane | None = None
        self._holders = 0
        # Number of calls in each of the latest waves, in order.
        self.wave_sizes: deque[int] = deque(maxlen=KEPT_WAVE_SIZES)

    def submit(self, body: dict[str, Any]) -> Any:
        """Run one native ``/generate`` body, and return its parsed answer.

        Raises:
            RequestError: the engine rejected the request.
            EngineError: the wave failed, or ``run_batch`` was stopped.
            InputError: the body cannot be written as JSON.
        """
        try:
            call = WaveCall(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))
        except orjson.JSONEncodeError as error:
            raise InputError(
                f"a generation cannot be sent as JSON ({error}); its parameters are "
                f"{body.get('sampling_params')!r}"
            ) from None
        if call.stop_reason is not None:
            raise EngineError(call.stop_reason)
        self.transport.check_caller()
        with self.lane() as lane:
            status, answer = lane.answer_to(call)
        if status >= 400:
            raise _request_error(status, answer)
        return orjson.loads(answer)

    @contextmanager
    def lane(self) -> Iterator[WaveLane]:
        """The lane, which is open while at least one caller holds it."""
        with self._lock:
            lane = self._lane
            if lane is None:
                lane = WaveLane(self.transport, self._quiet_s, self.wave_sizes)
                self._lane = lane
            self._holders += 1
        try:
            yield lane
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self._lane = None
                    lane.close()


def _request_error(status: int, answer: bytes) -> RequestError:
    try:
        error = orjson.loads(answer)["error"]
        return RequestError(
            status, error["message"], param=error.get("param"), code=error.get("code")
        )
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return RequestError(status, answer.decode(errors="replace"))


CONNECT_TIMEOUT_S = 60


class _WaveAnswer(msgspec.Struct):
    index: int
    status_code: int
    body: msgspec.Raw


class HttpTransport(WaveTransport):
    """Sends waves to a server launched with ``--offline-batch``, one POST each.

    Args:
        verify: file with the certificate authority of the server's certificate.
        priority: see ``BatchBackend``.
        kind: ``requests`` for native bodies, ``lines`` for lines of a batch file.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        verify: str | None,
        priority: int | None = None,
        kind: str = "requests",
    ) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json", **authorization(api_key)}
        self._tls = ssl.create_default_context(cafile=verify) if verify else True
        self._start = f'{{"{kind}":['.encode()
        self._end = b"]}" if priority is None else b'],"priority":%d}' % priority
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
            # aiohttp resolves host names and reads files in these threads.
            await asyncio.get_running_loop().shutdown_default_executor()

    async def send(self, bodies: list[bytes], on_answer: OnAnswer) -> None:
        missing = len(bodies)
        try:
            async with self._open_session().post(
                self._url + WAVE_PATH,
                # aiohttp sends a file in chunks, and reads answers between them.
                data=io.BytesIO(self._start + b",".join(bodies) + self._end),
                headers=self._headers,
            ) as response:
                if response.status != 200:
                    text = (await response.text())[:500]
                    raise EngineError(
                        f"{self._url} refused it with HTTP {response.status}: {text}"
                    )
                self.max_inflight = int(response.headers.get(MAX_INFLIGHT, 0)) or None
                lines = LineSplitter()
                async for chunk in response.content.iter_any():
                    for line in lines.add(chunk):
                        found = msgspec.json.decode(line, type=_WaveAnswer)
                        on_answer(found.index, found.status_code, bytes(found.body))
                        missing -= 1
        except (aiohttp.ClientError, OSError) as error:
            if missing:
                raise EngineError(
                    f"the connection to {self._url} was lost with {missing} answers "
                    f"missing ({type(error).__name__}: {error}); is the server "
                    "still running?"
                ) from error
        if missing:
            raise EngineError(
                f"{self._url} ended it with {missing} answers missing; "
                "the server's log says why."
            )

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, ssl=self._tls, socket_factory=_keepalive_socket
                ),
                # A wave may take hours. Only connecting has a time limit.
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=CONNECT_TIMEOUT_S
                ),
                trust_env="://127.0.0.1:" not in self._url,  # no proxy within a machine
            )
        return self._session


def _keepalive_socket(address: Any) -> socket.socket:
    """A socket that detects, within hours, that the other machine is gone."""
    family, kind, protocol = address[:3]
    connection = socket.socket(family, kind, protocol)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection


class EngineTransport(WaveTransport):
    """Sends waves to a ``sglang.Engine(offline_batch=True)`` in this process. ``priority``:
    see ``BatchBackend``. Raises EngineError if the engine is not an offline one.
    """

    def __init__(self, engine: Any, priority: int | None = None) -> None:
        from ..srt.engine.sglang_engine import SGLangEngine

        if not getattr(engine.server_args, "offline_batch", False):
            raise EngineError(
                "this engine was not launched for offline batches; "
                "launch it with sglang.Engine(offline_batch=True, ...)."
            )
        self.loop = loop = engine.loop
        self._priority = INTERACTIVE_PRIORITY if priority is None else priority
        self._engine = SGLangEngine(engine.tokenizer_manager, engine.template_manager)
        self._config = OfflineBatchConfig.from_json(
            engine.server_args.offline_batch_config
        )
        if _running_loop() is None and not loop.is_running():
            loop.run_until_complete(self._engine.connect())
        if threading.current_thread() is threading.main_thread():
            # SGLang's signal handlers must run also while its loop is not in the main thread,
            # which alone handles signals: without the one that reports a dead scheduler,
            # requests would wait forever.
            manager = engine.tokenizer_manager
            handler = manager.signal_handler_class(manager)
            for signum, handle in (
                (signal.SIGTERM, handler.sigterm_handler),
                (signal.SIGQUIT, handler.running_phase_sigquit_handler),
            ):
                # Any other handler was installed by the owner, and is kept.
                if getattr(signal.getsignal(signum), "__self__", None) is loop:
                    signal.signal(signum, handle)

    def check_caller(self) -> None:
        if _running_loop() is self.loop:
            raise EngineError(
                "programs cannot run in a coroutine on the engine's own event loop, "
                "which must answer them; call run_batch in asyncio.to_thread(...)."
            )

    async def send(self, bodies: list[bytes], on_answer: OnAnswer) -> None:
        if self._engine.closing:
            raise EngineError("the engine was asked to stop and takes no new calls.")
        requests = [
            BatchRequestInput(index, str(index), GENERATE_URL, body)
            for index, body in enumerate(bodies)
        ]
        equal = find_equal(requests, range(len(requests)), self._config.dedupe)
        await Job(
            f"wave_{uuid.uuid4().hex}",
            requests,
            equal.todo,
            self._engine,
            self._config,
            equal.sharing(
                lambda request, output: on_answer(
                    request.index, output.status_code, output.body
                )
            ),
            JobOptions(priority=self._priority),
        ).run()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
