"""Messages from a prefill rank to a decode rank over TCP, and back on the control socket.

A frame on the TCP connection is a header of 16 bytes, a short description (msgpack) and a
payload of raw bytes:

    magic (4) | length of the description (4) | length of the payload (8)

Decode ranks answer on the control socket that SGLang opens for them. SGLang's own messages,
which give a request up or report a failure, pass there as well.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable

import msgspec

_HEADER = struct.Struct("!4sIQ")
_MAGIC = b"SBKV"
MAX_DESCRIPTION = 1 << 16
# Bytes of a payload. A sender cuts its pages so that a frame has fewer.
MAX_PAYLOAD = 1 << 28

# Seconds in which a peer must take or send more bytes of a frame that was begun.
STALL_S = 30
# A peer that vanished without a word is noticed after about 10 + 3 * 5 seconds.
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))

Buffer = bytes | bytearray | memoryview


class BrokenFrame(Exception):
    """The bytes on a connection are no frame, or one that does not fit its request."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first frame, which names the sender.

    secret: sent by the decode rank to this prefill rank and to nobody else.
    bootstrap_addr: the prefill server, by the address that the decode rank knows.
    """

    secret: str
    bootstrap_addr: str


class Pages(msgspec.Struct, frozen=True, tag=True):
    """Pages ``[first, first + count)`` of a request, counted behind its known prefix.

    The payload has their KV, all buffers one after the other.
    """

    room: int
    first: int
    count: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """The payload has the request's metadata. All of its pages came before.

    num_pages: all pages of the request. rank: the prefill rank that sent them.
    """

    room: int
    num_pages: int
    rank: int


Description = Hello | Pages | Done
_descriptions = msgspec.msgpack.Decoder(Description)


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
    connection: socket.socket, description: Description, payload: Iterable[Buffer] = ()
) -> int:
    """Send a frame, and return the bytes of its payload.

    Raises:
        OSError: the peer is gone, or took nothing for ``STALL_S`` seconds.
    """
    encoded = msgspec.msgpack.encode(description)
    parts = [memoryview(part).cast("B") for part in payload]
    length = sum(len(part) for part in parts)
    connection.sendall(_HEADER.pack(_MAGIC, len(encoded), length) + encoded)
    for part in filter(len, parts):
        connection.sendall(part)
    return length


class FrameReader:
    """Reads the frames of a connection into one buffer, which grows as needed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._header = bytearray(_HEADER.size)
        self._buffer = bytearray()

    def read(self) -> tuple[Description, memoryview] | None:
        """The next frame. None if the peer closed the connection between two frames.

        Returns:
            Its description, and its payload, which is valid until the next frame is read.

        Raises:
            BrokenFrame: what came is no frame, ends within one, or stalls within one.
            OSError: the connection is lost.
        """
        header = memoryview(self._header)
        if not self._fill(header, may_end=True):
            return None
        magic, description_len, payload_len = _HEADER.unpack(self._header)
        if magic != _MAGIC:
            raise BrokenFrame(f"it begins with {magic!r} instead of {_MAGIC!r}")
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
        try:
            return _descriptions.decode(description), payload
        except msgspec.MsgspecError as error:
            raise BrokenFrame(f"the description of a frame: {error}") from None

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


class Layout(msgspec.Struct, frozen=True):
    """What both sides must have in common for KV to be copied byte by byte.

    kv_rows: bytes of a page in each buffer. aux_rows: bytes of each kind of metadata.
    """

    tp_size: int
    page_size: int
    kv_dtype: str
    kv_rows: tuple[int, ...]
    aux_rows: tuple[int, ...]

    def difference(self, other: Layout) -> str | None:
        """How a decode side differs from this prefill side, and the way out."""
        if self.tp_size != other.tp_size:
            return (
                f"--tp-size is {self.tp_size} on the prefill server and "
                f"{other.tp_size} on the decode server; the tcp backend needs the same "
                "on both"
            )
        if (self.page_size, self.kv_dtype) != (other.page_size, other.kv_dtype):
            return (
                f"KV pages have {self.page_size} tokens of {self.kv_dtype} on the "
                f"prefill server and {other.page_size} of {other.kv_dtype} on the decode "
                "server; give both the same --page-size and --kv-cache-dtype"
            )
        if self.kv_rows != other.kv_rows:
            return (
                f"KV has {len(self.kv_rows)} buffers with {sum(self.kv_rows)} bytes per "
                f"page on the prefill server, and {len(other.kv_rows)} with "
                f"{sum(other.kv_rows)} on the decode server; serve the same model"
            )
        if self.aux_rows != other.aux_rows:
            return (
                "the metadata of requests differs; give both servers the same release "
                "of SGLang and the same flags"
            )
        return None


class Registration(msgspec.Struct, frozen=True, tag=True):
    """A decode rank, as a prefill rank gets to know it.

    session: names the decode rank and the address under which it knows the prefill
        server. A restarted decode server has another one.
    host, port: of its listener for KV. control_port: of its control socket.
    secret: proves to the listener that a sender is a prefill rank.
    """

    session: str
    host: str
    port: int
    control_port: int
    secret: str
    bootstrap_addr: str
    layout: Layout


class RoomOpened(msgspec.Struct, frozen=True, tag=True):
    """The decode rank has room for a request's KV behind ``prefix_len`` tokens."""

    room: int
    session: str
    prefix_len: int


_CONTROL = b"SB_CONTROL"


def encode(message: Registration | RoomOpened) -> list[bytes]:
    """The parts of a message on the control socket."""
    return [_CONTROL, msgspec.msgpack.encode(message)]


def decode(parts: list[bytes]) -> Registration | RoomOpened | None:
    """A message of ours, None if it is one of SGLang's.

    Raises:
        msgspec.MsgspecError: it is neither.
    """
    if len(parts) != 2 or parts[0] != _CONTROL:
        return None
    return msgspec.msgpack.decode(parts[1], type=Registration | RoomOpened)
