"""Where waves go: over HTTP to an offline server, or into an engine in this process."""

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

from .config import OfflineBatchConfig
from .engine import GENERATE_URL, WAVE_PATH
from .errors import ApiError, ConfigError, EngineError, InputError
from .job import Job
from .request import BatchRequestInput
from .wave import Answer, Call, Transport, WaveLane

CONNECT_TIMEOUT_S = 60
KEPT_WAVE_SIZES = 10_000


class RequestError(ApiError, RuntimeError):
    """The engine answered one call with an error; other calls are unaffected."""


class WaveClient:
    """Sends calls of any thread in waves over one transport.

    The transport's event loop runs, in a thread of ours, only while calls are under
    way or a lane is held: in between, an engine's loop is free for its owner.

    Args:
        quiet_s: how long after the last call a wave leaves while the engine is busy.
    """

    def __init__(self, transport: Transport, quiet_s: float) -> None:
        if not quiet_s > 0:
            raise ConfigError(f"quiet_s={quiet_s!r} must be above 0, such as 0.01.")
        self._transport = transport
        self._quiet_s = quiet_s
        self._lock = threading.Lock()
        self._lane: WaveLane | None = None
        self._holders = 0
        # Sizes of the latest waves, in order: what the engine got to see at once.
        self.wave_sizes: deque[int] = deque(maxlen=KEPT_WAVE_SIZES)

    def check_caller(self) -> None:
        """Raise EngineError if the current thread must not wait for an answer."""
        self._transport.check_caller()

    def submit(self, body: dict[str, Any]) -> Any:
        """Run one native ``/generate`` body; blocks until its answer is there.

        Raises:
            RequestError: the engine rejected the request.
            EngineError: the wave was cut off, or the run was stopped.
            InputError: the body is not JSON.
        """
        try:
            call = Call(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))
        except orjson.JSONEncodeError as error:
            raise InputError(
                f"a generation cannot be sent as JSON ({error}); its parameters are "
                f"{body.get('sampling_params')!r}"
            ) from None
        if call.stop_reason is not None:
            raise EngineError(call.stop_reason)
        self.check_caller()
        with self.lane() as lane:
            status, answer = lane.ask(call)
        if status >= 400:
            raise _request_error(status, answer)
        return orjson.loads(answer)

    @contextmanager
    def lane(self) -> Iterator[WaveLane]:
        """The lane, which stays open while at least one caller holds it."""
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


class _Line(msgspec.Struct):
    index: int
    status_code: int
    body: msgspec.Raw


class HttpTransport:
    """Waves to a server launched with ``--offline-batch``, one POST each."""

    def __init__(self, url: str, api_key: str | None, verify: str | None) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._tls = ssl.create_default_context(cafile=verify) if verify else True
        self._session: aiohttp.ClientSession | None = None

    def check_caller(self) -> None:
        """Any thread may wait."""

    def open_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()

    def close_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
            # Threads that aiohttp read names and files in.
            await asyncio.get_running_loop().shutdown_default_executor()

    async def send(self, bodies: list[bytes], answer: Answer) -> None:
        missing = len(bodies)
        try:
            async with self._open_session().post(
                self._url + WAVE_PATH,
                # From a file, aiohttp sends in pieces and lets answers in between.
                data=io.BytesIO(b'{"requests":[' + b",".join(bodies) + b"]}"),
                headers=self._headers,
            ) as response:
                if response.status != 200:
                    text = (await response.text())[:500]
                    raise EngineError(
                        f"{self._url} refused it with HTTP {response.status}: {text}"
                    )
                parts: list[bytes] = []
                async for chunk in response.content.iter_any():
                    parts.append(chunk)
                    if b"\n" not in chunk:
                        continue
                    *lines, rest = b"".join(parts).split(b"\n")
                    parts = [rest]
                    for line in lines:
                        found = msgspec.json.decode(line, type=_Line)
                        answer(found.index, found.status_code, bytes(found.body))
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
                # A wave may take all night; only a connection must come about.
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=CONNECT_TIMEOUT_S
                ),
                trust_env=True,
            )
        return self._session


def _keepalive_socket(address: Any) -> socket.socket:
    """A socket that notices, within hours, that the other machine is gone."""
    family, kind, protocol = address[:3]
    connection = socket.socket(family, kind, protocol)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection


class EngineTransport:
    """Waves into a ``sglang.Engine(offline_batch=True)`` of this process."""

    def __init__(self, engine: Any) -> None:
        from .srt.engine import SGLangEngine

        if not getattr(engine.server_args, "offline_batch", False):
            raise EngineError(
                "this engine was not launched for offline batches; "
                "launch it with sglang.Engine(offline_batch=True, ...)."
            )
        self._loop: asyncio.AbstractEventLoop = engine.loop
        self._engine = SGLangEngine(engine.tokenizer_manager, engine.template_manager)
        self._config = OfflineBatchConfig.from_json(
            engine.server_args.offline_batch_config
        )
        if _running_loop() is None and not self._loop.is_running():
            self._loop.run_until_complete(self._engine.connect())
        if threading.current_thread() is threading.main_thread():
            _hear_signals(engine.tokenizer_manager, self._loop)

    def check_caller(self) -> None:
        if _running_loop() is self._loop:
            raise EngineError(
                "programs cannot run from a coroutine on the engine's own event loop, "
                "which must answer them; call run_batch in asyncio.to_thread(...)."
            )

    def open_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def close_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing: the loop is the engine's."""

    async def close(self) -> None:
        """Nothing was opened."""

    async def send(self, bodies: list[bytes], answer: Answer) -> None:
        if self._engine.closing:
            raise EngineError("the engine was asked to stop and takes no new calls.")
        requests = [
            BatchRequestInput(index, str(index), GENERATE_URL, body)
            for index, body in enumerate(bodies)
        ]
        await Job(
            f"wave_{uuid.uuid4().hex}",
            requests,
            range(len(requests)),
            self._engine,
            self._config,
            lambda request, output: answer(
                request.index, output.status_code, output.body
            ),
        ).run()


def _hear_signals(tokenizer_manager: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Let SGLang's signal handlers run while its loop is in a thread of ours.

    SGLang has the loop call them, and a loop hears signals in the main thread only.
    One of them says that a scheduler died: unheard, its requests wait for ever.
    """
    handler = tokenizer_manager.signal_handler_class(tokenizer_manager)
    for signum, handle in (
        (signal.SIGTERM, handler.sigterm_handler),
        (signal.SIGQUIT, handler.running_phase_sigquit_handler),
    ):
        # Any other handler is the owner's own, and stays.
        if getattr(signal.getsignal(signum), "__self__", None) is loop:
            signal.signal(signum, handle)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
