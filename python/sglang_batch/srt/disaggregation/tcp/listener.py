"""The decode side of the connections: one listener per decode rank."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from .destinations import Destinations
from .frames import (
    BrokenFrame,
    Done,
    FrameReader,
    Hello,
    Kind,
    Pages,
    describe,
    prepare_socket,
)

logger = logging.getLogger(__name__)


class Listener:
    """Receives the KV that prefill ranks send to this rank, in a thread for each.

    Args:
        host: the address to listen on.
        on_done: called with the end of each room's transfer.
        on_lost: called with a prefill server's bootstrap address and the reason when one
            of its connections ends. Its requests that are not done never will be.
    """

    def __init__(
        self,
        host: str,
        destinations: Destinations,
        on_done: Callable[[Done], None],
        on_lost: Callable[[str, str], None],
    ) -> None:
        self._destinations = destinations
        self._on_done = on_done
        self._on_lost = on_lost
        self.secret = secrets.token_urlsafe(16)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        self.port = int(self._socket.getsockname()[1])
        self._closed = False
        threading.Thread(target=self._accept, name="kv-listener", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, address = self._socket.accept()
            except OSError as error:
                if not self._closed:
                    logger.error("No further connections for KV: %s", error)
                return
            threading.Thread(
                target=self._serve,
                args=(connection, str(address[0])),
                name="kv-reader",
                daemon=True,
            ).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        sender, reason = "", "it closed the connection"
        try:
            with connection:
                prepare_socket(connection)
                reader = FrameReader(connection)
                sender = self._greet(reader)
                while self._receive(reader):
                    pass
        except (BrokenFrame, OSError) as error:
            reason = str(error)
        except Exception as error:
            logger.exception("KV from %s could not be received", peer)
            reason = repr(error)
        if not sender:
            logger.warning("A connection from %s was refused: %s", peer, reason)
            return
        self._on_lost(sender, reason)

    def _greet(self, reader: FrameReader) -> str:
        """The bootstrap address of a sender that knows our secret."""
        frame = reader.read()
        if frame is None or frame.kind is not Kind.HELLO:
            raise BrokenFrame("it does not begin with HELLO")
        hello = describe(frame, Hello)
        if not secrets.compare_digest(hello.secret.encode(), self.secret.encode()):
            raise BrokenFrame("it does not know the secret of this decode rank")
        return hello.bootstrap_addr

    def _receive(self, reader: FrameReader) -> bool:
        """Take a frame. False if there are no more."""
        frame = reader.read()
        if frame is None:
            return False
        if frame.kind is Kind.PAGES:
            self._destinations.write(describe(frame, Pages), frame.payload)
        elif frame.kind is Kind.DONE:
            done = describe(frame, Done)
            if self._destinations.finish(done, frame.payload):
                self._on_done(done)
        else:
            raise BrokenFrame(f"{frame.kind.name} came within a connection")
        return True
