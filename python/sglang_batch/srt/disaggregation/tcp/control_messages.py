"""What decode ranks tell prefill ranks, on the control socket that SGLang opens for them.

SGLang's own messages, which give a request up or report a failure, pass there as well.
"""

from __future__ import annotations

import msgspec

REGISTER = b"SB_REGISTER"
ROOM = b"SB_ROOM"


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


class Registration(msgspec.Struct, frozen=True):
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


class RoomOpened(msgspec.Struct, frozen=True):
    """The decode rank has room for a request's KV behind ``prefix_len`` tokens."""

    room: int
    session: str
    prefix_len: int


def encode(message: Registration | RoomOpened) -> list[bytes]:
    """The parts of a message on the control socket."""
    tag = REGISTER if isinstance(message, Registration) else ROOM
    return [tag, msgspec.msgpack.encode(message)]


def decode(parts: list[bytes]) -> Registration | RoomOpened | None:
    """A message of ours, None if it is one of SGLang's.

    Raises:
        msgspec.MsgspecError: it is neither.
    """
    if len(parts) != 2 or parts[0] not in (REGISTER, ROOM):
        return None
    if parts[0] == REGISTER:
        return msgspec.msgpack.decode(parts[1], type=Registration)
    return msgspec.msgpack.decode(parts[1], type=RoomOpened)
