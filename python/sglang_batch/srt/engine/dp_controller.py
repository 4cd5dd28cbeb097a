"""The process that spreads requests over data-parallel replicas waits while idle."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_device

if TYPE_CHECKING:
    import zmq

# SGLang's loop feeds its watchdog at least this often.
WAIT_MS = 1000


class _WaitingSocket:
    """A socket that waits for a message even if it is asked not to."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def recv(self, flags: int = 0) -> Any:
        self._socket.poll(WAIT_MS)
        return self._socket.recv(flags)

    def recv_pyobj(self, flags: int = 0) -> Any:
        self._socket.poll(WAIT_MS)
        return self._socket.recv_pyobj(flags)


def wait_for_messages(original: Callable[[Any], None], controller: Any) -> None:
    """AROUND hook on ``DataParallelController.event_loop``, which looks all the time."""
    if get_device().sleep_on_idle:
        controller.recv_from_tokenizer = _WaitingSocket(controller.recv_from_tokenizer)
    original(controller)
