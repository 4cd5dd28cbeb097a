"""Waves of calls on their way to an engine: a server over HTTP, or one in this process."""

from __future__ import annotations

import asyncio
import io
import signal
import socket
import ssl
import threading
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
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
from ..request import BatchRequestInput, LineSplitter
from .waves import OnAnswer, WaveCall, WaveLane, WaveTransport

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
        self._transport = transport
        self._quiet_s = quiet_s
        self._lock = threading.Lock()
        self._lane: WaveLane | None = None
        self._holders = 0
        # Number of calls in each of the latest waves, in order.
        self.wave_sizes: deque[int] = deque(maxlen=KEPT_WAVE_SIZES)

    def check_caller(self) -> None:
        """Raise EngineError if the current thread must not block for an answer."""
        self._transport.check_caller()

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
        self.check_caller()
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
                lane = WaveLane(self._transport, self._quiet_s, self.wave_sizes)
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


# How waves reach an engine: over HTTP to an offline server, or in this process.

CONNECT_TIMEOUT_S = 60


class _WaveAnswer(msgspec.Struct):
    """One line of the server's response to a wave."""

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
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
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
                trust_env=True,
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
        self._loop: asyncio.AbstractEventLoop = engine.loop
        self._priority = INTERACTIVE_PRIORITY if priority is None else priority
        self._engine = SGLangEngine(engine.tokenizer_manager, engine.template_manager)
        self._config = OfflineBatchConfig.from_json(
            engine.server_args.offline_batch_config
        )
        if _running_loop() is None and not self._loop.is_running():
            self._loop.run_until_complete(self._engine.connect())
        if threading.current_thread() is threading.main_thread():
            _handle_signals(engine.tokenizer_manager, self._loop)

    def check_caller(self) -> None:
        if _running_loop() is self._loop:
            raise EngineError(
                "programs cannot run in a coroutine on the engine's own event loop, "
                "which must answer them; call run_batch in asyncio.to_thread(...)."
            )

    def open_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def close_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing: the loop belongs to the engine."""

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


def _handle_signals(tokenizer_manager: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Let SGLang's signal handlers run while its loop is not in the main thread, which alone
    handles signals. One of them reports that a scheduler died: without it, requests would
    wait forever.
    """
    handler = tokenizer_manager.signal_handler_class(tokenizer_manager)
    for signum, handle in (
        (signal.SIGTERM, handler.sigterm_handler),
        (signal.SIGQUIT, handler.running_phase_sigquit_handler),
    ):
        # Any other handler was installed by the owner, and is kept.
        if getattr(signal.getsignal(signum), "__self__", None) is loop:
            signal.signal(signum, handle)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
