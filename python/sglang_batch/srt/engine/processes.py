"""Processes of an engine: reports of a slow start, and a controller that waits while idle."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]
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


EVERY_S = 5.0
# A process that works and gets less of a core than this competes with others.
STARVED = 0.5
# SGLang's name for a process that has imported its modules.
_TITLE = "sglang::"


def tell_of_schedulers(
    result: tuple[Any, object], *_args: object, **_kwargs: object
) -> None:
    """AFTER hook on ``Engine._launch_scheduler_processes``: waiting for them is not silent."""
    launched, _ = result
    launched.wait_for_ready = partial(tell_while_waiting, launched.wait_for_ready)


def tell_while_waiting(original: Callable[..., Any], *args: Any) -> Any:
    """Call a function, with a line on stderr each ``EVERY_S`` until it returns."""
    # Blocked while a server started its processes.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    over = threading.Event()
    telling = threading.Thread(target=_tell, args=(over,), daemon=True)
    telling.start()
    try:
        return original(*args)
    finally:
        over.set()
        telling.join()


def _tell(over: threading.Event) -> None:
    watch = StartWatch(psutil.Process())
    while not over.wait(EVERY_S):
        print(watch.line(), file=sys.stderr, flush=True)


class StartWatch:
    """Reports on the child processes of an engine that starts.

    parent: the process that waits for them.
    """

    def __init__(self, parent: psutil.Process) -> None:
        self._parent = parent
        self._began = self._looked = time.monotonic()
        self._cpu_s: dict[int, float] = {}

    def line(self) -> str:
        """One line: seconds so far, and each process's work since the last line."""
        now = time.monotonic()
        seconds, self._looked = now - self._looked, now
        found: list[str] = []
        working, used = 0, 0.0
        for process in self._parent.children(recursive=True):
            # One that ended meanwhile is SGLang's to report.
            with suppress(psutil.Error):
                title = " ".join(process.cmdline())
                if "resource_tracker" in title:
                    continue
                times = process.cpu_times()
                cpu_s = times.user + times.system
                share = (cpu_s - self._cpu_s.get(process.pid, 0.0)) / max(seconds, 1e-9)
                self._cpu_s[process.pid] = cpu_s
                if process.status() == psutil.STATUS_RUNNING:
                    working, used = working + 1, used + share
                found.append(
                    f"{_work(title)} (process {process.pid}, CPU {cpu_s:.0f} s)"
                )
        text = f"Waiting for the engine for {now - self._began:.0f} s: "
        text += ", ".join(found) or "its processes are not there yet"
        if working and used < STARVED * working:
            text += (
                f". They get {used / working:.0%} of a core each: other processes keep "
                f"this machine's {len(os.sched_getaffinity(0))} cores busy (load "
                f"{os.getloadavg()[0]:.0f})"
            )
        return f"{text}."


def _work(title: str) -> str:
    if title.startswith(_TITLE):
        return f"{title.removeprefix(_TITLE).split()[0]} sets up"
    return "a process imports SGLang"
