"""A Ray actor that has an engine and serves it to the head of a fleet.

Ray gives it resources, restarts nothing, and tells when it dies. It outlives the head: a new
head finds it by its name, with the model loaded. Without a head it ends after a while.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from ...errors import ConfigError
from ..worker_host import WorkerHost

logger = logging.getLogger(__name__)

# Seconds without a head after which the worker frees its resources.
ORPHAN_S = 600.0
# Seconds that running lines have to end once the machine is about to stop.
DRAIN_S = 25.0
_CHECK_S = 0.5

StartEngine = Callable[
    [], AbstractContextManager[tuple[Any, asyncio.AbstractEventLoop]]
]


@dataclass(frozen=True, slots=True)
class StartFailure:
    """Why an engine did not start. ``of_options``: it never will with this model and these
    options.
    """

    reason: str
    of_options: bool


class RayWorker:
    """The actor's class. Its constructor loads the model, in the process's main thread.

    Args:
        start: loads the model; its context has an engine and its event loop.
        name: for messages.
        directory: the head's working directory, for relative paths.
    """

    def __init__(self, start: StartEngine, name: str, directory: str) -> None:
        self._name = name
        self._failure: StartFailure | None = None
        with suppress(OSError):
            os.chdir(directory)
        try:
            self._engine_context = start()
            engine, self._loop = self._engine_context.__enter__()
            self._loop.run_until_complete(engine.connect())
        except BaseException as error:  # SGLang may end with SystemExit
            traceback.print_exc()
            reason = " ".join(str(error).split()) or type(error).__name__
            self._failure = StartFailure(reason, isinstance(error, ConfigError))
            return
        self._children = _children()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._host = WorkerHost(engine, name)
        signal.signal(signal.SIGTERM, self._leave)
        threading.Thread(target=self._watch, daemon=True).start()

    def started(self) -> str | StartFailure:
        """The id of the node that this runs on, or why the engine did not start."""
        import ray

        return self._failure or str(ray.get_runtime_context().get_node_id())

    def call(self, name: str, data: bytes) -> bytes:
        work = self._host.call(name, data)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _leave(self, *_: object) -> None:
        """The machine is about to stop."""
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        self._loop.call_soon_threadsafe(
            self._host.leave, "its machine is about to stop (SIGTERM)"
        )
        deadline = time.monotonic() + DRAIN_S
        time.sleep(2 * _CHECK_S)  # the head takes the waiting lines back
        while time.monotonic() < deadline and self._host.is_busy:
            time.sleep(_CHECK_S)
        self._exit()

    def _watch(self) -> None:
        """End this process when the engine has died, or no head has come for long."""
        alone_since = time.monotonic()
        while True:
            time.sleep(_CHECK_S)
            if any(map(_is_dead, self._children)):
                logger.error("Worker %s: a process of SGLang has died", self._name)
                self._exit()
            if self._host.is_attached:
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > ORPHAN_S:
                logger.error("Worker %s: no head for %g s", self._name, ORPHAN_S)
                self._exit()

    def _exit(self) -> NoReturn:
        for child in _children():
            with suppress(Exception):
                child.kill()
        logging.shutdown()
        os._exit(1)


def _children() -> list[Any]:
    import psutil  # type: ignore[import-untyped]

    return list(psutil.Process().children(recursive=True))


def _is_dead(child: Any) -> bool:
    import psutil

    try:
        return bool(child.status() == psutil.STATUS_ZOMBIE) or not child.is_running()
    except psutil.NoSuchProcess:
        return True
