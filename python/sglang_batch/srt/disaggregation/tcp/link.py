"""The prefill side of a connection: one to each decode rank, with a thread that sends."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .frames import (
    MAX_PAYLOAD,
    Done,
    Hello,
    Kind,
    Pages,
    prepare_socket,
    send_frame,
)
from .page_buffers import Indices, PageBuffers

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
# Bytes of KV that are copied and sent at a time.
FRAME_BYTES = 8 << 20


class Event(Protocol):
    """Work of the device that must be over before its KV is read."""

    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pages of a request that are computed.

    first: the position of the first of them.
    rows: their rows in the KV pool.
    aux_row: with the last pages of the request, the row of its metadata. Otherwise None.
    after: what must be over before the pages are read.
    """

    room: int
    first: int
    rows: Indices
    aux_row: int | None
    after: tuple[Event, ...] = ()


class Rooms(Protocol):
    """The states of requests, as the sender of a link sees them."""

    def is_live(self, room: int) -> bool:
        """Whether a request still wants its KV to be sent."""
        ...

    def sent(self, room: int) -> None:
        """All KV of a request is on its way."""
        ...

    def failed(self, room: int, reason: str) -> None:
        """The KV of a request will not be sent."""
        ...


class Link:
    """Sends KV to one decode rank, in the order in which it is given.

    Args:
        address: host and port of the decode rank's listener.
        rank: the number of this prefill rank.
        on_lost: called once, with this link and the reason, when the connection ends.
    """

    def __init__(
        self,
        address: tuple[str, int],
        hello: Hello,
        rank: int,
        kv: PageBuffers,
        aux: PageBuffers,
        rooms: Rooms,
        on_lost: Callable[[Link, str], None],
    ) -> None:
        self._address = address
        self._hello = hello
        self._rank = rank
        self._kv = kv
        self._aux = aux
        self._rooms = rooms
        self._on_lost = on_lost
        self._chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._lost = False
        self.sent_bytes = 0
        threading.Thread(target=self._run, name="kv-sender", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        return self._lost

    def send(self, chunk: Chunk) -> None:
        """Send a chunk after all that were given before."""
        self._chunks.put(chunk)

    def close(self) -> None:
        """End the connection. What was not sent fails."""
        self._lose("it was closed")

    def _run(self) -> None:
        try:
            connection = socket.create_connection(self._address, timeout=CONNECT_S)
            prepare_socket(connection)
            self._connection = connection
            if self._lost:  # closed meanwhile
                connection.close()
                return
            send_frame(connection, Kind.HELLO, self._hello)
            threading.Thread(target=self._watch, name="kv-watch", daemon=True).start()
            while (chunk := self._chunks.get()) is not None:
                self._send(connection, chunk)
        except OSError as error:
            self._lose(str(error))
        except Exception as error:
            logger.exception("KV could not be sent to %s:%d", *self._address)
            self._lose(repr(error))

    def _send(self, connection: socket.socket, chunk: Chunk) -> None:
        for event in chunk.after:
            event.synchronize()
        for first, rows in self._parts(chunk):
            if not self._rooms.is_live(chunk.room):
                return
            pages = Pages(chunk.room, first, len(rows))
            self.sent_bytes += send_frame(
                connection, Kind.PAGES, pages, self._kv.read(rows)
            )
        # The pages of a request that was given up may belong to another one by now, so
        # it must not end as if they were right.
        if chunk.aux_row is None or not self._rooms.is_live(chunk.room):
            return
        done = Done(chunk.room, chunk.first + len(chunk.rows), self._rank)
        aux = self._aux.read(np.array([chunk.aux_row]))
        send_frame(connection, Kind.DONE, done, aux)
        self._rooms.sent(chunk.room)

    def _parts(self, chunk: Chunk) -> Iterator[tuple[int, Indices]]:
        most = max(1, min(FRAME_BYTES, MAX_PAYLOAD) // max(1, self._kv.row_bytes))
        for start in range(0, len(chunk.rows), most):
            yield chunk.first + start, chunk.rows[start : start + most]

    def _watch(self) -> None:
        """Notice the end of the connection while there is nothing to send."""
        connection = self._connection
        assert connection is not None
        while not self._lost:
            try:
                if not connection.recv(1):
                    self._lose("the decode rank closed the connection")
            except BlockingIOError:  # the time limit of the socket
                continue
            except OSError as error:
                self._lose(str(error))

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._lost:
                return
            self._lost = True
        self._chunks.put(None)
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
        self._on_lost(self, reason)
