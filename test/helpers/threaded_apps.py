"""Applications on real ports, in threads of this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI


class ThreadedApp:
    """An application that answers at ``url`` until :meth:`stop`."""

    def __init__(self, app: FastAPI) -> None:
        config = uvicorn.Config(
            app, ws="none", log_level="critical", timeout_graceful_shutdown=0
        )
        self._server = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}
        )
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the application did not start"
            time.sleep(0.005)

    def stop(self) -> None:
        """End it, with its port."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


@contextmanager
def threaded(app: FastAPI) -> Iterator[ThreadedApp]:
    """An application at work until the block ends."""
    running = ThreadedApp(app)
    try:
        yield running
    finally:
        running.stop()
