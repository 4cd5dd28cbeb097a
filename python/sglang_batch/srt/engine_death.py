"""Tells who asks when a process of the engine died, before this one is ended too.

SGLang's scheduler sends its parent SIGQUIT when it fails, and SGLang's watchdog does
when a process is gone without a word. The handler ends all processes: what is not on
disk by then is lost.

With several tokenizer workers, one of them runs the batches and the main process hears of
it: it passes the signal on to them, and then ends them all.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
from uvicorn.supervisors import multiprocess

logger = logging.getLogger(__name__)

# How SGLang calls a tokenizer worker.
WORKER_TITLE = "sglang::tokenizer_worker"
# How long the main process waits for its workers to write down what they know.
PATIENCE_S = 5.0

# What CUDA has to be started with to write core dumps when asked, and how long SGLang
# waits for them before it ends.
CORE_DUMPS = "CUDA_ENABLE_USER_TRIGGERED_COREDUMP"
CORE_DUMP_WAIT = "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS"

_listeners: list[Callable[[], None]] = []


def listen(listener: Callable[[], None]) -> None:
    """Have ``listener`` called, on the event loop, when the engine has died."""
    _listeners.append(listener)


def tell(*_args: Any, **_kwargs: Any) -> None:
    """BEFORE hook on SGLang's handler of SIGQUIT."""
    for listener in _listeners:
        try:
            listener()
        except Exception:
            logger.exception("What the engine was doing could not be written down")
    if os.environ.get(CORE_DUMPS) != "1":
        # None will come, and whoever starts the server again waits, too.
        os.environ.setdefault(CORE_DUMP_WAIT, "0")


def tell_workers() -> None:
    """Have tokenizer workers told before SGLang's handler in this process kills them.

    In the main process, after SGLang has set its handler of SIGQUIT and before uvicorn
    starts the workers.
    """
    # Uvicorn would take the signal for itself and do nothing: the server would stay
    # there without an engine, with every call waiting.
    multiprocess.SIGNALS.pop(signal.SIGQUIT, None)
    kill_all = signal.getsignal(signal.SIGQUIT)

    def handle(signum: int, frame: Any) -> None:
        workers = [p for p in psutil.Process().children() if _is_worker(p)]
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGQUIT)
        psutil.wait_procs(workers, timeout=PATIENCE_S)
        if callable(kill_all):
            kill_all(signum, frame)

    signal.signal(signal.SIGQUIT, handle)


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(WORKER_TITLE in word for word in process.cmdline()[:1])
    return False
