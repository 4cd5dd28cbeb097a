"""Calls of frontend programs, sent in waves and answered one by one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from ..errors import ApiError, ConfigError, EngineError, InputError
from .waves import WaveCall, WaveLane, WaveTransport

KEPT_WAVE_SIZES = 10_000


class RequestError(ApiError, RuntimeError):
    """The engine answered one call with an error. Other calls are unaffected."""


class WaveClient:
    """Sends calls from any thread in waves over one transport.

    The transport's event loop runs in a thread of this client, but only while calls
    are in flight or a lane is held. At other times the owner of an engine can use its
    loop.

    Args:
        quiet_s: while the engine is busy, a wave is sent when no call has arrived for
            this many seconds.

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
        """Run one native ``/generate`` body, and block until its answer.

        Returns:
            The parsed answer.

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
