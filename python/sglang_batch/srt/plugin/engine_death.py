"""Notifies listeners that a process of the engine died, before this process ends too.

SGLang's scheduler sends its parent SIGQUIT when it fails, and so does SGLang's watchdog when
a process ends silently. SGLang's handler ends all processes. With several tokenizer workers,
one of them runs the batches but the main process gets the signal, and passes it on.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil  # type: ignore[import-untyped]
from uvicorn.supervisors import multiprocess

logger = logging.getLogger(__name__)

# SGLang's title for the process of a tokenizer worker.
WORKER_TITLE = "sglang::tokenizer_worker"
# How long the main process waits for its workers to save their state, in seconds.
PATIENCE_S = 5.0

# CUDA's switch for core dumps on demand, and SGLang's wait for them before it ends.
CORE_DUMPS = "CUDA_ENABLE_USER_TRIGGERED_COREDUMP"
CORE_DUMP_WAIT = "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS"


_listeners: list[Callable[[], None]] = []


def listen(listener: Callable[[], None]) -> None:
    """Call ``listener`` on the event loop when an offline engine of this process has died."""
    _listeners.append(listener)


def tell(*_args: object, **_kwargs: object) -> None:
    """BEFORE hook on SGLang's handler of SIGQUIT."""
    for listener in _listeners:
        try:
            listener()
        except Exception:
            logger.exception("The engine's requests in flight could not be recorded")
    if os.environ.get(CORE_DUMPS) != "1":
        # There will be no core dump to wait for, and a restart would wait as well.
        os.environ.setdefault(CORE_DUMP_WAIT, "0")


@contextmanager
def telling_workers() -> Iterator[None]:
    """In this block of the main process, tokenizer workers are notified before SGLang's
    handler of SIGQUIT, which is set already, kills them."""
    # Uvicorn would handle the signal itself and do nothing, and every call would hang.
    uvicorns = multiprocess.SIGNALS.pop(signal.SIGQUIT, None)
    kill_all = signal.getsignal(signal.SIGQUIT)

    def handle(signum: int, frame: FrameType | None) -> None:
        workers = [p for p in psutil.Process().children() if _is_worker(p)]
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGQUIT)
        psutil.wait_procs(workers, timeout=PATIENCE_S)
        if callable(kill_all):
            kill_all(signum, frame)

    signal.signal(signal.SIGQUIT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGQUIT, kill_all or signal.SIG_DFL)
        if uvicorns is not None:
            multiprocess.SIGNALS[signal.SIGQUIT] = uvicorns


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(WORKER_TITLE in word for word in process.cmdline()[:1])
    return False
