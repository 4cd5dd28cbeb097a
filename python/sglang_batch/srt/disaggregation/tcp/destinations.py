"""Where the KV of each request goes on the decode side, for as long as it may be written.

The reader of a connection writes here, and the scheduler opens and closes. Both hold the
lock, so a request that is closed is never written again: its pages can be given to
another request at once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from .frames import BrokenFrame, Done, Pages
from .page_buffers import Indices, PageBuffers


@dataclass(slots=True)
class _Destination:
    """rows: of each page, in the order of the prompt. received: pages that have come."""

    rows: Indices
    aux_row: int
    buffers: PageBuffers
    received: int = 0


class Destinations:
    """The requests whose KV is expected, by room.

    Args:
        device: the KV pool.
        host: host memory of the same rows, if there is any.
        aux: the metadata that comes with the last page.
    """

    def __init__(
        self, device: PageBuffers, aux: PageBuffers, host: PageBuffers | None = None
    ) -> None:
        self._device = device
        self._host = host
        self._aux = aux
        self._lock = threading.Lock()
        self._of_room: dict[int, _Destination] = {}

    def __len__(self) -> int:
        return len(self._of_room)

    def __contains__(self, room: int) -> bool:
        return room in self._of_room

    @property
    def has_host(self) -> bool:
        """Whether KV can be received into host memory."""
        return self._host is not None

    def receive_on_host(self, pages: PageBuffers) -> None:
        """Have KV that is opened with ``host`` written to these pages."""
        self._host = pages

    def open(self, room: int, rows: Indices, aux_row: int, *, host: bool) -> None:
        """Expect the pages of a room.

        Args:
            rows: of the KV pool, or of host memory with ``host``.
        """
        buffers = self._host if host else self._device
        if buffers is None:
            raise ValueError("there is no host memory to receive KV into")
        with self._lock:
            self._of_room[room] = _Destination(np.asarray(rows), aux_row, buffers)

    def close(self, room: int) -> None:
        """Write nothing more for a room. What still comes for it is dropped."""
        with self._lock:
            self._of_room.pop(room, None)

    def write(self, pages: Pages, payload: memoryview) -> None:
        """Write pages of a room, which come in order.

        Raises:
            BrokenFrame: they do not fit the request.
        """
        with self._lock:
            to = self._of_room.get(pages.room)
            if to is None:
                return
            end = pages.first + pages.count
            if pages.first != to.received or pages.count < 0 or end > len(to.rows):
                raise BrokenFrame(
                    f"pages {pages.first} to {end} of room {pages.room} came after "
                    f"{to.received} of {len(to.rows)}"
                )
            try:
                to.buffers.write(to.rows[pages.first : end], payload)
            except (IndexError, ValueError) as error:
                raise BrokenFrame(f"pages of room {pages.room}: {error}") from None
            to.received = end

    def finish(self, done: Done, payload: memoryview) -> bool:
        """Write the metadata of a room whose pages have all come, and close it.

        Returns:
            Whether the room was open.

        Raises:
            BrokenFrame: pages are missing, or the metadata has another size.
        """
        with self._lock:
            to = self._of_room.get(done.room)
            if to is None:
                return False
            if not to.received == done.num_pages == len(to.rows):
                raise BrokenFrame(
                    f"room {done.room} ended after {to.received} of {len(to.rows)} "
                    f"pages, and {done.num_pages} were sent"
                )
            try:
                self._aux.write(np.array([to.aux_row]), payload)
            except (IndexError, ValueError) as error:
                raise BrokenFrame(f"metadata of room {done.room}: {error}") from None
            del self._of_room[done.room]
            return True
