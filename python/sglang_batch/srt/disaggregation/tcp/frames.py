"""Frames on the TCP connection from a prefill rank to a decode rank.

A frame is a header of 17 bytes, a short description (msgpack) and a payload of raw bytes:

    magic (4) | kind (1) | length of the description (4) | length of the payload (8)
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import TypeVar

import msgspec

_HEADER = struct.Struct("!4sBIQ")
_MAGIC = b"SBKV"
MAX_DESCRIPTION = 1 << 16
# Bytes of a payload. A sender cuts its pages so that a frame has fewer.
MAX_PAYLOAD = 1 << 28

# Seconds in which a peer must take or send more bytes of a frame that was begun.
STALL_S = 30
# A peer that vanished without a word is noticed after about 10 + 3 * 5 seconds.
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")


class BrokenFrame(Exception):
    """The bytes on a connection are no frame, or one that does not fit its request."""


class Kind(IntEnum):
    """What a frame is.

    HELLO: the first one, which names the sender.
    PAGES: KV of some pages of a request, all buffers one after the other.
    DONE: the request's metadata. All of its pages came before.
    """

    HELLO = 1
    PAGES = 2
    DONE = 3


class Hello(msgspec.Struct, frozen=True):
    """secret: what the decode rank sent to this prefill rank and to nobody else.
    bootstrap_addr: the prefill server, by the address that the decode rank knows."""

    secret: str
    bootstrap_addr: str


class Pages(msgspec.Struct, frozen=True):
    """Pages ``[first, first + count)`` of a request, counted behind its known prefix."""

    room: int
    first: int
    count: int


class Done(msgspec.Struct, frozen=True):
    """num_pages: all pages of the request. rank: the prefill rank that sent them."""

    room: int
    num_pages: int
    rank: int


class Frame(msgspec.Struct, frozen=True):
    """A frame as it was read. The payload is valid until the next one is read."""

    kind: Kind
    description: bytes
    payload: memoryview


def describe(frame: Frame, kind: type[T]) -> T:
    """The description of a frame.

    Raises:
        BrokenFrame: it is none of this type.
    """
    try:
        return msgspec.msgpack.decode(frame.description, type=kind)
    except msgspec.MsgspecError as error:
        raise BrokenFrame(f"a {frame.kind.name} frame: {error}") from None


def prepare_socket(connection: socket.socket) -> None:
    """Have a connection notice a peer that is gone or stuck."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.settimeout(None)
    stall = struct.pack("ll", STALL_S, 0)
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, stall)


def send_frame(
    connection: socket.socket,
    kind: Kind,
    description: msgspec.Struct,
    payload: Iterable[Buffer] = (),
) -> int:
    """Send a frame, and return the bytes of its payload.

    Raises:
        OSError: the peer is gone, or took nothing for ``STALL_S`` seconds.
    """
    encoded = msgspec.msgpack.encode(description)
    parts = [memoryview(part).cast("B") for part in payload]
    length = sum(len(part) for part in parts)
    connection.sendall(_HEADER.pack(_MAGIC, kind, len(encoded), length) + encoded)
    for part in parts:
        if len(part):
            connection.sendall(part)
    return length


class FrameReader:
    """Reads the frames of a connection into one buffer, which grows as needed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._header = bytearray(_HEADER.size)
        self._buffer = bytearray()

    def read(self) -> Frame | None:
        """The next frame. None if the peer closed the connection between two frames.

        Raises:
            BrokenFrame: what came is no frame, ends within one, or stalls within one.
            OSError: the connection is lost.
        """
        header = memoryview(self._header)
        if not self._fill(header, may_end=True):
            return None
        magic, number, description_len, payload_len = _HEADER.unpack(self._header)
        if magic != _MAGIC:
            raise BrokenFrame(f"it begins with {magic!r} instead of {_MAGIC!r}")
        if number not in list(Kind):
            raise BrokenFrame(f"there are no frames of kind {number}")
        if description_len > MAX_DESCRIPTION or payload_len > MAX_PAYLOAD:
            raise BrokenFrame(
                f"it announces {description_len} + {payload_len} bytes, and at most "
                f"{MAX_DESCRIPTION} + {MAX_PAYLOAD} are allowed"
            )
        description = bytearray(description_len)
        self._fill(memoryview(description))
        if len(self._buffer) < payload_len:
            self._buffer = bytearray(payload_len)
        payload = memoryview(self._buffer)[:payload_len]
        self._fill(payload)
        return Frame(Kind(number), bytes(description), payload)

    def _fill(self, buffer: memoryview, *, may_end: bool = False) -> bool:
        """Read exactly these bytes. With ``may_end`` nothing may come at all."""
        read = 0
        while read < len(buffer):
            try:
                count = self._connection.recv_into(buffer[read:])
            except BlockingIOError:  # the time limit of the socket
                if may_end and not read:
                    continue
                raise BrokenFrame(
                    f"nothing came for {STALL_S} seconds within a frame"
                ) from None
            if count == 0:
                if may_end and not read:
                    return False
                raise BrokenFrame("the connection ended within a frame")
            read += count
        return True
